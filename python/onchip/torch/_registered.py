"""An operator in `torch.ops.onchip`: forward, backward and, of recurrences, step, with fake
kernels, and what autograd does at forward: through the dispatcher, or in a Function where nobody
watches.

A result that is not wanted has no elements.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip import _calls
from onchip.errors import Unsupported
from onchip.torch._arguments import (
    NO_FORWARD_MODE,
    are_plain,
    checked,
    is_watched,
    refuse_tangents,
    require_tensor,
    transforms_active,
)
from onchip.torch._library import LIBRARY, define, written
from onchip.torch._operators import is_batched

# Of the options that an operator has, in its schema.
_KINDS = {
    "activation": "str?",
    "gate_first": "bool",
    "group_size": "int?",
    "normalize": "bool?",
    "gate": "str",
    "eps": "float",
    "detach_normalizer": "bool",
    "dt_softplus": "bool",
    "delta_softplus": "bool",
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
# What else onchip.ops' functions take beside their tensors.
_NO_OPTIONS = frozenset(
    {
        *LENGTHS,
        "d_o",
        "d_final_state",
        "initial_state",
        "output_final_state",
        "state",
        "state_indices",
    }
)

Arguments = dict[str, Any]


class Signature(NamedTuple):
    """An operator's arguments by name, in the order of its schemas."""

    name: str
    required: frozenset[str]
    # Tensors with gradients, and those without.
    differentiable: tuple[str, ...]
    integers: tuple[str, ...]
    options: tuple[str, ...]
    # Of forward alone.
    forward_options: tuple[str, ...]
    # Gradients of results, the first of which backward always has.
    cotangents: tuple[str, ...]
    # What onchip's calls name the results of forward, and of backward, in this order.
    results: tuple[str, ...]
    gradients: tuple[str, ...]
    # Of a step; no states: there is none.
    step_tensors: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    step_options: tuple[str, ...] = ()
    # Operands of products, which autocast casts: not gates, not constants.
    operands: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.differentiable + self.integers


def options_of(function: Callable[..., Any], tensors: Sequence[str]) -> tuple[str, ...]:
    """Those of one of onchip.ops' functions."""
    parameters = inspect.signature(function).parameters
    unknown = parameters.keys() - _KINDS.keys() - _NO_OPTIONS - set(tensors)
    if unknown:
        raise TypeError(f"{function.__name__}: of no kind for a schema: {sorted(unknown)}")
    return tuple(name for name in _KINDS if name in parameters and name not in tensors)


class _Shaped(NamedTuple):
    """What shapes of results are computed from."""

    shape: tuple[int, ...]
    dtype: str


def _shaped(tensor: Tensor) -> _Shaped:
    return _Shaped(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _made(output: _calls.Output, like: Tensor) -> Tensor:
    return like.new_empty(output.shape, dtype=getattr(torch, output.dtype))


def _as_tuple(results: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The dispatcher returns a single result as it is."""
    return (results,) if isinstance(results, Tensor) else tuple(results)


class RegisteredOperator:
    """The machinery; a subclass knows how onchip's calls are made of the arguments."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.name = signature.name
        self.tensors = signature.tensors
        self.options = signature.options
        self._register()
        operators = torch.ops.onchip
        self.forward_op = getattr(operators, f"{self.name}_forward")
        self.backward_op = getattr(operators, f"{self.name}_backward")
        if signature.states:
            self.step_op = getattr(operators, f"{self.name}_step")

    # ---- what a subclass knows

    def prepared(self, phase: str, given: Arguments) -> tuple[_calls.Operator, Arguments]:
        """The call, with no results but those that it makes; tensors and options by the names of
        the schemas."""
        raise NotImplementedError

    def with_gradient(self, options: Arguments) -> int:
        """How many results after the first are made and have a gradient."""
        raise NotImplementedError

    def zero_cotangent(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Of the first result, which a loss of the others left without one: a row in memory,
        repeated."""
        raise NotImplementedError

    # ---- schemas

    def _kind(self, name: str) -> str:
        own = self.signature
        required = name in own.required or name == own.cotangents[0]
        return "Tensor" if required else "Tensor?"

    def _register(self) -> None:
        own = self.signature
        tensors = [f"{self._kind(name)} {name}" for name in own.tensors]
        options = [f"{_KINDS[name]} {name}" for name in own.options]
        name = f"onchip::{own.name}"
        self._define(
            "forward",
            [*tensors, *options, *(f"bool {x}" for x in own.forward_options)],
            len(own.results),
            self.forward,
            self.forward_shapes,
        )
        self._define(
            "backward",
            [
                *(f"{self._kind(x)} {x}" for x in own.cotangents),
                *tensors,
                *options,
                f"bool[{len(own.differentiable)}] wanted",
            ],
            len(own.differentiable),
            self.backward,
            self.backward_shapes,
        )
        torch.library.register_autograd(
            f"{name}_forward", _differentiate, setup_context=self._save_watched, lib=LIBRARY
        )
        torch.library.register_autograd(
            f"{name}_backward", self.refuse_second_derivatives, lib=LIBRARY
        )
        if not own.states:
            return
        # A schema has a letter for each tensor that may be written; the first is always there.
        states = {
            state: f"Tensor({letter}!)" + ("" if letter == "a" else "?")
            for state, letter in zip(own.states, "abc", strict=False)
        }
        self._define(
            "step",
            [
                *(f"{states.get(x, self._kind(x))} {x}" for x in own.step_tensors),
                *(f"{_KINDS[x]} {x}" for x in own.step_options),
            ],
            1,
            lambda *arguments: (self.step(*arguments),),
            lambda *arguments: (self.step_shapes(*arguments),),
        )

    def _define(
        self,
        phase: str,
        arguments: Sequence[str],
        results: int,
        kernel: Callable[..., tuple[Tensor, ...]],
        shapes: Callable[..., tuple[Tensor, ...]],
    ) -> None:
        name = f"{self.name}_{phase}"
        if results > 1:
            define(name, arguments, results, kernel, shapes)
        else:
            define(name, arguments, 1, lambda *x: kernel(*x)[0], lambda *x: shapes(*x)[0])

    # ---- the calls; arguments in the order of the schemas

    def _prepared(
        self, phase: str, names: Sequence[str], options: Sequence[str], arguments: Sequence[Any]
    ) -> tuple[_calls.Operator, Arguments]:
        tensors = arguments[: len(names)]
        refuse_tangents(f"{self.name}_{phase}", tensors)
        given: Arguments = {
            name: None if x is None else x.detach() for name, x in zip(names, tensors, strict=True)
        }
        given.update(zip(options, arguments[len(names) :], strict=True))
        return self.prepared(phase, given)

    def _shapes(self, op: _calls.Operator, arguments: Arguments) -> list[_calls.Output]:
        views: Any = {name: _shaped(x) for name, x in arguments.items() if isinstance(x, Tensor)}
        return op.outputs(views)

    def prepared_forward(self, arguments: Sequence[Any]) -> tuple[_calls.Operator, Arguments]:
        options = self.options + self.signature.forward_options
        return self._prepared("forward", self.tensors, options, arguments)

    def _results(self, made: Mapping[str, Tensor], like: Tensor) -> tuple[Tensor, ...]:
        names = self.signature.results
        return tuple(made[name] if name in made else like.new_empty((0,)) for name in names)

    def forward(self, *arguments: Any) -> tuple[Tensor, ...]:
        return self._results(_calls.run(*self.prepared_forward(arguments)), arguments[0])

    def forward_shapes(self, *arguments: Any) -> tuple[Tensor, ...]:
        op, given = self.prepared_forward(arguments)
        like = arguments[0]
        made = {output.name: _made(output, like) for output in self._shapes(op, given)}
        return self._results(made, like)

    def backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        """The gradients of the differentiable tensors."""
        own, wanted = self.signature, arguments[-1]
        unwanted = [name for name, want in zip(own.gradients, wanted, strict=True) if not want]
        op, given = self._prepared(
            "backward", own.cotangents + own.tensors, own.options, arguments[:-1]
        )
        made = _calls.run(op, given, unwanted)
        empty = arguments[0].new_empty
        return tuple(made[name] if name in made else empty((0,)) for name in own.gradients)

    def backward_shapes(self, *arguments: Any) -> tuple[Tensor, ...]:
        first = len(self.signature.cotangents)
        tensors = arguments[first : first + len(self.signature.differentiable)]
        return tuple(
            torch.empty_like(x, memory_format=torch.contiguous_format)
            if want
            else arguments[0].new_empty((0,))
            for x, want in zip(tensors, arguments[-1], strict=True)
        )

    def _prepared_step(self, arguments: Sequence[Any]) -> tuple[_calls.Operator, Arguments]:
        own = self.signature
        return self._prepared("step", own.step_tensors, own.step_options, arguments)

    def step(self, *arguments: Any) -> Tensor:
        """The first result of one token; the states are written in place."""
        own = self.signature
        result: Tensor = _calls.run(*self._prepared_step(arguments))[own.results[0]]
        tensors = zip(own.step_tensors, arguments, strict=False)
        written(x for name, x in tensors if name in own.states and x is not None)
        return result

    def step_shapes(self, *arguments: Any) -> Tensor:
        op, given = self._prepared_step(arguments)
        (output,) = self._shapes(op, given)
        return _made(output, arguments[0])

    # ---- autograd

    def refuse_second_derivatives(self, *_: Any) -> Any:
        raise Unsupported(
            f"{self.name}_backward: got a gradient to differentiate again (create_graph=True, or a "
            f"nested transform of torch.func), and {self.name} has no second derivative: use first "
            "derivatives, or the plain formula in torch where second ones are needed"
        )

    def save(self, ctx: Any, arguments: Sequence[Any], results: Sequence[Tensor]) -> None:
        own = self.signature
        values = arguments[len(self.tensors) :]
        ctx.set_materialize_grads(False)
        options = dict(zip(own.options + own.forward_options, values, strict=True))
        ctx.mark_non_differentiable(*results[1 + self.with_gradient(options) :])
        ctx.save_for_backward(*arguments[: len(self.tensors)])
        ctx.values = values[: len(own.options)]
        ctx.operator = self

    def _save_watched(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        self.save(ctx, inputs, _as_tuple(output))
        ctx.first = 0
        ctx.transformed = False

    # ---- calls by the shortest way

    def run(self, tensors: Sequence[Tensor | None], values: Sequence[Any]) -> tuple[Tensor, ...]:
        required = self.signature.required
        differentiate, plain = _examine(f"{self.name}_forward", self.tensors, required, tensors)
        if plain:
            if differentiate:
                results: tuple[Tensor, ...] = _Direct.apply(self, *tensors, *values)
                return results
            return self.forward(*tensors, *values)
        kinds = {name: _KINDS[name] for name in self.options}
        kinds |= dict.fromkeys(self.signature.forward_options, "bool")
        values = checked(f"{self.name}_forward", kinds, values)
        if not torch.compiler.is_compiling() and transforms_active():
            results = _Transformed.apply(self, *tensors, *values)
            return results
        return _as_tuple(self.forward_op(*tensors, *values))

    def run_step(self, tensors: Sequence[Tensor | None], values: Sequence[Any]) -> Tensor:
        own, name = self.signature, f"{self.name}_step"
        required = own.required | {own.states[0]}
        differentiate, plain = _examine(name, own.step_tensors, required, tensors)
        if differentiate:
            raise Unsupported(
                f"{name}: got a tensor that requires grad, and a step, which writes its state in "
                f"place, has no gradient: call it under torch.no_grad() (onchip.torch.{self.name} "
                "has gradients)"
            )
        if plain:
            return self.step(*tensors, *values)
        values = checked(name, {option: _KINDS[option] for option in own.step_options}, values)
        result: Tensor = self.step_op(*tensors, *values)
        return result


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
        require_tensor(op, name, tensor)
        differentiate = differentiate or (grad_enabled and tensor.requires_grad)
    return differentiate, are_plain(tensors) and not is_watched(tensors[0])


def _differentiate(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
    op: RegisteredOperator = ctx.operator
    own = op.signature
    tensors = ctx.saved_tensors
    results: list[Tensor | None] = [None] * (
        ctx.first + len(tensors) + len(own.options) + len(own.forward_options)
    )
    first, *others = cotangents[: len(own.cotangents)]
    if first is None and all(x is None for x in others):
        return tuple(results)
    # torch.func always asks for a graph of the gradient; whoever uses it meets the refusal then.
    if torch.is_grad_enabled() and not ctx.transformed:
        op.refuse_second_derivatives()
    if first is None:
        first = op.zero_cotangent(dict(zip(op.tensors, tensors, strict=True)))
    indices = range(ctx.first, ctx.first + len(own.differentiable))
    wanted = [ctx.needs_input_grad[index] for index in indices]
    given = (first, *others, *tensors)
    arguments = (*given, *ctx.values, wanted)
    if ctx.transformed:
        gradients = _TransformedBackward.apply(op, *arguments)
    elif are_plain(given) and not (is_watched(first) or is_batched(first, *others)):
        gradients = op.backward(*arguments)
    else:
        gradients = _as_tuple(op.backward_op(*arguments))
    for index, want, gradient in zip(indices, wanted, gradients, strict=True):
        if want:
            results[index] = gradient
    return tuple(results)


class _Direct(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """The forward operator without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, op: RegisteredOperator, *arguments: Any) -> tuple[Tensor, ...]:
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
    def forward(op: RegisteredOperator, *arguments: Any) -> Any:
        return _as_tuple(op.forward_op(*arguments))

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
    def forward(op: RegisteredOperator, *arguments: Any) -> Any:
        return _as_tuple(op.backward_op(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.operator = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        ctx.operator.refuse_second_derivatives()

    jvp = staticmethod(_refuse_jvp)
