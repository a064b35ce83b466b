"""The linear operators in `torch.ops.onchip`: forward, backward and step of every row of onchip's
own table, with fake kernels, and what autograd does at forward: through the dispatcher, or in a
Function where nobody watches.

A state of several parts is as many tensors in a schema: initial_state_0, initial_state_1, ...
A result that is not wanted has no elements.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip import _calls
from onchip._linear import calls
from onchip._linear.calls import Row
from onchip.errors import InvalidArgument, Unsupported
from onchip.torch._arguments import (
    NO_FORWARD_MODE,
    are_plain,
    is_watched,
    refuse_tangents,
    transforms_active,
)
from onchip.torch._library import LIBRARY, define
from onchip.torch._operators import is_batched

# Of the options that an operator has, in its schema.
_KINDS = {
    "normalize": "bool?",
    "gate": "str",
    "eps": "float",
    "detach_normalizer": "bool",
    "dt_softplus": "bool",
    "dt_limit": "float[]",
    "qk_l2norm": "bool",
    "lower_bound": "float?",
    "allow_neg_eigval": "bool",
    "num_householder": "int",
    "scale": "float?",
    "chunk_len": "int?",
    "state_layout": "str",
    "check": "bool",
    "backend": "str?",
}
LENGTHS = ("cu_seqlens", "seqlens")


class _Shaped(NamedTuple):
    """What the table's shapes are computed from."""

    shape: tuple[int, ...]
    dtype: str


def _shaped(tensor: Tensor) -> _Shaped:
    return _Shaped(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _made(output: _calls.Output, like: Tensor) -> Tensor:
    return like.new_empty(output.shape, dtype=getattr(torch, output.dtype))


def parts_of(name: str, count: int) -> tuple[str, ...]:
    """A state's names in a schema."""
    if count == 1:
        return (name,)
    return tuple(f"{name}_{part}" for part in range(count))


def _options_of(function: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters
    return tuple(name for name in _KINDS if name in parameters)


class LinearOperator:
    """A row of the table as PyTorch has it."""

    def __init__(self, row: Row, backward: Callable[..., Any], step: Callable[..., Any]) -> None:
        """Options are those of onchip.ops' functions; mlstm's forward alone lacks one."""
        self.row = row
        self.name = row.name
        self.required = frozenset(set(row.tensors) - set(row.optional))
        # As many parts as a state has at most; mlstm's third, the stabiliser, has no gradient.
        self.parts = row.state_parts({"gate": "exp", "normalize": True})
        self.d_parts = min(self.parts, 2)
        self.options = _options_of(backward)
        self.differentiable = (*row.tensors, *parts_of("initial_state", self.parts))
        self.tensors = (*self.differentiable, *LENGTHS)
        self.saved = ("d_o", *parts_of("d_final_state", self.d_parts))
        self.step_tensors = (*row.tensors, *parts_of("state", self.parts), "state_indices")
        self.step_options = _options_of(step)
        # Operands of products, which autocast casts: not gates, not constants.
        self.operands = tuple(x for x, role in row.tensors.items() if role in ("q", "k", "v"))
        self._register()
        operators = torch.ops.onchip
        self.forward_op = getattr(operators, f"{self.name}_forward")
        self.backward_op = getattr(operators, f"{self.name}_backward")
        self.step_op = getattr(operators, f"{self.name}_step")

    # ---- schemas

    def _kind(self, name: str) -> str:
        return "Tensor" if name in self.required or name == "d_o" else "Tensor?"

    def _register(self) -> None:
        tensors = [f"{self._kind(name)} {name}" for name in self.tensors]
        options = [f"{_KINDS[name]} {name}" for name in self.options]
        define(
            f"{self.name}_forward",
            [*tensors, *options, "bool output_final_state"],
            1 + self.parts,
            self.forward,
            self.forward_shapes,
        )
        define(
            f"{self.name}_backward",
            [
                *(f"{self._kind(name)} {name}" for name in self.saved),
                *tensors,
                *options,
                f"bool[{len(self.differentiable)}] wanted",
            ],
            len(self.differentiable),
            self.backward,
            self.backward_shapes,
        )
        states = {
            name: f"Tensor({letter}!)" + ("" if letter == "a" else "?")
            for name, letter in zip(parts_of("state", self.parts), "abc", strict=False)
        }
        define(
            f"{self.name}_step",
            [
                *(f"{states.get(name, self._kind(name))} {name}" for name in self.step_tensors),
                *(f"{_KINDS[name]} {name}" for name in self.step_options),
            ],
            1,
            self.step,
            self.step_shapes,
        )
        torch.library.register_autograd(
            f"onchip::{self.name}_forward",
            _differentiate,
            setup_context=self._save_watched,
            lib=LIBRARY,
        )
        torch.library.register_autograd(
            f"onchip::{self.name}_backward", self.refuse_second_derivatives, lib=LIBRARY
        )

    # ---- the calls; arguments in the order of the schemas

    def _given(
        self, tensors: Mapping[str, Tensor | None], values: Mapping[str, Any]
    ) -> dict[str, Any]:
        """As the table's calls take them: states as tuples."""
        given = {name: None if x is None else x.detach() for name, x in tensors.items()}
        for state in ("initial_state", "d_final_state", "state"):
            parts = [given.pop(name) for name in parts_of(state, self.parts) if name in given]
            while parts and parts[-1] is None:
                parts.pop()
            given[state] = tuple(parts) or None
        return given | dict(values)

    def _prepared(
        self, phase: str, names: Sequence[str], options: Sequence[str], arguments: Sequence[Any]
    ) -> tuple[_calls.Operator, dict[str, Any]]:
        tensors = arguments[: len(names)]
        refuse_tangents(f"{self.name}_{phase}", tensors)
        given = self._given(
            dict(zip(names, tensors, strict=True)),
            dict(zip(options, arguments[len(names) :], strict=True)),
        )
        if phase != "backward":
            given.pop("d_final_state")
        given.pop("initial_state" if phase == "step" else "state")
        return calls.prepared(self.row, phase, given)

    def _shapes(self, op: _calls.Operator, arguments: Mapping[str, Any]) -> list[_calls.Output]:
        views: Any = {name: _shaped(x) for name, x in arguments.items() if isinstance(x, Tensor)}
        return op.outputs(views)

    def _prepared_forward(self, arguments: Sequence[Any]) -> tuple[_calls.Operator, Any]:
        options = (*self.options, "output_final_state")
        return self._prepared("forward", self.tensors, options, arguments)

    def _forward_results(self, made: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        o = made["o"]
        states = calls.part_names("final_state")[: self.parts]
        return (o, *(made[name] if name in made else o.new_empty((0,)) for name in states))

    def forward(self, *arguments: Any) -> tuple[Tensor, ...]:
        """o and the parts of the final state."""
        return self._forward_results(_calls.run(*self._prepared_forward(arguments)))

    def forward_shapes(self, *arguments: Any) -> tuple[Tensor, ...]:
        op, given = self._prepared_forward(arguments)
        like = arguments[0]
        return self._forward_results(
            {output.name: _made(output, like) for output in self._shapes(op, given)}
        )

    def _prepared_backward(self, arguments: Sequence[Any]) -> tuple[_calls.Operator, Any]:
        return self._prepared("backward", (*self.saved, *self.tensors), self.options, arguments)

    def _gradient_names(self) -> list[str]:
        states = calls.part_names("dinitial_state")[: self.parts]
        return [*("d" + name for name in self.row.tensors), *states]

    def backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        """The gradients of self.differentiable."""
        names, wanted = self._gradient_names(), arguments[-1]
        unwanted = [name for name, want in zip(names, wanted, strict=True) if not want]
        made = _calls.run(*self._prepared_backward(arguments[:-1]), unwanted)
        return tuple(made[x] if x in made else arguments[0].new_empty((0,)) for x in names)

    def backward_shapes(self, *arguments: Any) -> tuple[Tensor, ...]:
        tensors = arguments[len(self.saved) : len(self.saved) + len(self.differentiable)]
        return tuple(
            torch.empty_like(x, memory_format=torch.contiguous_format)
            if want
            else arguments[0].new_empty((0,))
            for x, want in zip(tensors, arguments[-1], strict=True)
        )

    def _prepared_step(self, arguments: Sequence[Any]) -> tuple[_calls.Operator, Any]:
        return self._prepared("step", self.step_tensors, self.step_options, arguments)

    def step(self, *arguments: Any) -> Tensor:
        """o; the states are written in place."""
        o: Tensor = _calls.run(*self._prepared_step(arguments))["o"]
        return o

    def step_shapes(self, *arguments: Any) -> Tensor:
        op, given = self._prepared_step(arguments)
        (o,) = self._shapes(op, given)
        return _made(o, arguments[0])

    # ---- autograd

    def state_parts(self, arguments: Sequence[Any]) -> int:
        """Parts of the final state that a call of forward returns."""
        values = dict(
            zip((*self.options, "output_final_state"), arguments[len(self.tensors) :], strict=True)
        )
        return self.row.state_parts(values) if values["output_final_state"] else 0

    def refuse_second_derivatives(self, *_: Any) -> Any:
        raise Unsupported(
            f"{self.name}_backward: got a gradient to differentiate again (create_graph=True, or a "
            f"nested transform of torch.func), and {self.name} has no second derivative: use first "
            "derivatives, or the plain recurrence in torch where second ones are needed"
        )

    def save(self, ctx: Any, arguments: Sequence[Any], results: Sequence[Tensor]) -> None:
        ctx.set_materialize_grads(False)
        returned = self.state_parts(arguments)
        without = [x for part, x in enumerate(results[1:]) if part >= min(returned, self.d_parts)]
        ctx.mark_non_differentiable(*without)
        ctx.save_for_backward(*arguments[: len(self.tensors)])
        ctx.values = arguments[len(self.tensors) : -1]
        ctx.operator = self

    def _save_watched(self, ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        self.save(ctx, inputs, output)
        ctx.first = 0
        ctx.transformed = False

    def run(self, tensors: Sequence[Tensor | None], values: Sequence[Any]) -> Sequence[Tensor]:
        """forward by the shortest way."""
        differentiate, plain = _examine(
            f"{self.name}_forward", self.tensors, self.required, tensors
        )
        if plain:
            if differentiate:
                results: Sequence[Tensor] = _Direct.apply(self, *tensors, *values)
                return results
            return self.forward(*tensors, *values)
        if not torch.compiler.is_compiling() and transforms_active():
            results = _Transformed.apply(self, *tensors, *values)
            return results
        results = self.forward_op(*tensors, *values)
        return results

    def run_step(self, tensors: Sequence[Tensor | None], values: Sequence[Any]) -> Tensor:
        name = f"{self.name}_step"
        required = self.required | {parts_of("state", self.parts)[0]}
        differentiate, plain = _examine(name, self.step_tensors, required, tensors)
        if differentiate:
            raise Unsupported(
                f"{name}: got a tensor that requires grad, and a step, which writes its state in "
                f"place, has no gradient: call it under torch.no_grad() (onchip.torch.{self.name} "
                "has gradients)"
            )
        if plain:
            return self.step(*tensors, *values)
        o: Tensor = self.step_op(*tensors, *values)
        return o


def _examine(
    op: str, names: Sequence[str], required: frozenset[str], tensors: Sequence[Any]
) -> tuple[bool, bool]:
    """Whether autograd has to record the call, and whether the dispatcher can be left out; refuses
    what is no tensor."""
    differentiate = False
    grad_enabled = torch.is_grad_enabled()
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is None and name not in required:
            continue
        if not isinstance(tensor, Tensor):
            raise InvalidArgument(
                f"{op}: {name}: got {type(tensor).__name__}, wanted torch tensors"
            )
        differentiate = differentiate or (grad_enabled and tensor.requires_grad)
    return differentiate, are_plain(tensors) and not is_watched(tensors[0])


def _differentiate(ctx: Any, d_o: Tensor | None, *d_final: Tensor | None) -> tuple[Any, ...]:
    op: LinearOperator = ctx.operator
    tensors = ctx.saved_tensors
    results: list[Tensor | None] = [None] * (
        ctx.first + len(op.tensors) + len(ctx.values) + len(("output_final_state",))
    )
    d_states = d_final[: op.d_parts]
    if d_o is None and all(x is None for x in d_states):
        return tuple(results)
    # torch.func always asks for a graph of the gradient; whoever uses it meets the refusal then.
    if torch.is_grad_enabled() and not ctx.transformed:
        op.refuse_second_derivatives()
    if d_o is None:
        d_o = _zero_cotangent(op, tensors)
    indices = range(ctx.first, ctx.first + len(op.differentiable))
    wanted = [ctx.needs_input_grad[index] for index in indices]
    saved = (d_o, *d_states)
    arguments = (*saved, *tensors, *ctx.values, wanted)
    if ctx.transformed:
        gradients = _TransformedBackward.apply(op, *arguments)
    elif are_plain((*saved, *tensors)) and not (is_watched(d_o) or is_batched(*saved)):
        gradients = op.backward(*arguments)
    else:
        gradients = op.backward_op(*arguments)
    for index, want, gradient in zip(indices, wanted, gradients, strict=True):
        if want:
            results[index] = gradient
    return tuple(results)


def _zero_cotangent(op: LinearOperator, tensors: Sequence[Tensor]) -> Tensor:
    """Of o, which only the final state's loss left without one: a row in memory, repeated."""
    named = dict(zip(op.tensors, tensors, strict=True))
    q, v = named[op.row.named("q")], named[op.row.named("v")]
    return q.new_zeros(v.shape[-1:]).expand(*q.shape[:-2], *v.shape[-2:])


class _Direct(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """The forward operator without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, op: LinearOperator, *arguments: Any) -> tuple[Tensor, ...]:
        results = op.forward(*arguments)
        op.save(ctx, arguments, results)
        ctx.first = 1
        ctx.transformed = False
        return results

    backward = staticmethod(_differentiate)


def _refuse_jvp(ctx: Any, *_: Any) -> Any:
    raise Unsupported(f"{ctx.operator.name}_forward: {NO_FORWARD_MODE}")


class _Transformed(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """The form that torch.func can transform."""

    generate_vmap_rule = True

    @staticmethod
    def forward(op: LinearOperator, *arguments: Any) -> Any:
        return op.forward_op(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        op, *arguments = inputs
        op.save(ctx, arguments, output)
        ctx.first = 1
        ctx.transformed = True

    backward = staticmethod(_differentiate)
    jvp = staticmethod(_refuse_jvp)


class _TransformedBackward(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    generate_vmap_rule = True

    @staticmethod
    def forward(op: LinearOperator, *arguments: Any) -> Any:
        return op.backward_op(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.operator = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        ctx.operator.refuse_second_derivatives()

    jvp = staticmethod(_refuse_jvp)
