"""The linear operators as functions: made from onchip.ops' own, whose arguments they take."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from onchip import ops
from onchip._linear import calls
from onchip._values import flag
from onchip.errors import InvalidArgument
from onchip.torch._arguments import autocast, integers, require_tensor
from onchip.torch._linear_operators import HelperOperator, LinearOperator
from onchip.torch._registered import LENGTHS, RegisteredOperator

P = ParamSpec("P")
R = TypeVar("R")


class _Parameters(NamedTuple):
    """Of a function: what Python's own binding does, in a form that torch.compile can follow."""

    signature: inspect.Signature
    names: tuple[str, ...]
    positional: tuple[str, ...]
    defaults: dict[str, Any]

    @staticmethod
    def of(function: Callable[..., Any]) -> "_Parameters":
        signature = inspect.signature(function)
        parameters = signature.parameters.values()
        return _Parameters(
            signature,
            tuple(p.name for p in parameters),
            tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD),
            {p.name: p.default for p in parameters if p.default is not p.empty},
        )

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        given = self.defaults | dict(zip(self.positional, args, strict=False)) | kwargs
        if (
            len(args) > len(self.positional)
            or any(name in kwargs for name in self.positional[: len(args)])
            or len(given) != len(self.names)
            or any(name not in given for name in self.names)
        ):
            self.signature.bind(*args, **kwargs)  # raises TypeError and says why
        return given


def _state(op: str, name: str, value: Any, parts: int) -> tuple[Tensor | None, ...]:
    """The parts of a state, None for those that it has not."""
    is_whole = not isinstance(value, (tuple, list))
    given = (value,) if is_whole else tuple(value)
    if not 1 <= len(given) <= parts:
        raise InvalidArgument(
            f"{op}: {name}: got {len(given)} parts, wanted "
            + ("a tensor" if parts == 1 else f"a tuple of 1 to {parts}")
        )
    for index, part in enumerate(given):
        if part is not None:
            require_tensor(op, name if is_whole else f"{name}[{index}]", part)
    return given + (None,) * (parts - len(given))


def _cast(op: RegisteredOperator, given: dict[str, Any]) -> dict[str, Any]:
    operands = op.signature.operands
    if not operands:
        return given
    cast = autocast(*(given[name] for name in operands))
    return given | dict(zip(operands, cast, strict=True))


def _lengths(name: str, given: dict[str, Any]) -> dict[str, Any]:
    lengths = {x: integers(name, x, given[x]) for x in LENGTHS if given.get(x) is not None}
    return given | lengths


def _with_final(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """A schema takes any number for a flag, and refuses others in its own words."""
    if "output_final_state" not in given:
        return given
    final = flag(name, "output_final_state", given["output_final_state"])
    return given | {"output_final_state": final}


def _forward(op: LinearOperator, given: dict[str, Any]) -> tuple[Tensor, Any]:
    name = f"{op.name}_forward"
    given = _with_final(name, _lengths(name, _cast(op, given)))
    tensors = (
        *(given[tensor] for tensor in op.row.tensors),
        *_state(name, "initial_state", given["initial_state"], op.parts),
        *(given[lengths] for lengths in LENGTHS),
    )
    values = [given[option] for option in (*op.options, "output_final_state")]
    o, *state = op.run(tensors, values)
    parts = op.row.state_parts(given) if given["output_final_state"] else 0
    if parts == 0:
        return o, None
    return o, state[0] if parts == 1 else tuple(state[:parts])


def _step(op: RegisteredOperator, given: dict[str, Any]) -> Tensor:
    own, name = op.signature, f"{op.name}_step"
    given = _cast(op, given)
    if given["state"] is None:
        require_tensor(name, "state", None)
    parts = _state(name, "state", given["state"], len(own.states))
    given |= dict(zip(own.states, parts, strict=True))
    if given["state_indices"] is not None:
        given["state_indices"] = integers(
            name, "state_indices", given["state_indices"], torch.int32
        )
    tensors = [given[tensor] for tensor in own.step_tensors]
    return op.run_step(tensors, [given[option] for option in own.step_options])


def _help(op: HelperOperator, given: dict[str, Any]) -> Any:
    """What onchip.ops' function returns: y, or with a state (y, state or None)."""
    given = _with_final(f"{op.name}_forward", _lengths(f"{op.name}_forward", given))
    own = op.signature
    tensors = [given[tensor] for tensor in op.tensors]
    y, *final = op.run(tensors, [given[x] for x in (*own.options, *own.forward_options)])
    if not own.states:
        return y
    return y, final[0] if given["output_final_state"] else None


OPERATORS = {
    row.name: LinearOperator(
        row, getattr(ops, f"{row.name}_backward"), getattr(ops, f"{row.name}_step")
    )
    for row in calls.ROWS
}

_DIFFERENTIABLE = """Differentiable once in every tensor and in the initial state, through o and the
final state; kept for backward are the inputs alone. Under autocast {operands} cast to its
dtype, float64 excepted; gates, constants and states keep theirs."""
_IN_PLACE = """For inference: a tensor that requires grad is refused unless under torch.no_grad().
Under torch.compile torch.ops.onchip.{name}_step stands in the graph and says that it writes the
state. Autocast: as {name}'s."""
_HELPED = """Differentiable once in every tensor, through every result; kept for backward are the
inputs alone. Autocast changes nothing: y has x's dtype."""


HELPERS = {
    "causal_conv1d": HelperOperator("causal_conv1d", ("x", "weight", "bias"), is_recurrence=True),
    "l2norm": HelperOperator("l2norm", ("x",), is_recurrence=False),
    "rms_norm_gated": HelperOperator(
        "rms_norm_gated", ("x", "gate", "weight"), is_recurrence=False
    ),
}


def _dress(function: Callable[..., Any], name: str, model: Callable[..., Any], more: str) -> None:
    function.__name__ = function.__qualname__ = name
    function.__module__ = "onchip.torch"
    function.__doc__ = f"{inspect.cleandoc(model.__doc__ or '')}\n\n{more}\n"
    function.__signature__ = inspect.signature(model)  # type: ignore[attr-defined]


def _differentiable(model: Callable[P, R]) -> Callable[P, R]:
    """onchip.ops' X_forward as X."""
    name = model.__name__.removesuffix("_forward")
    op, parameters = OPERATORS[name], _Parameters.of(model)

    def function(*args: Any, **kwargs: Any) -> Any:
        return _forward(op, parameters.bind(args, kwargs))

    *most, last = op.signature.operands
    operands = f"{', '.join(most)} and {last} are" if most else f"{last} is"
    _dress(function, name, model, _DIFFERENTIABLE.format(operands=operands))
    return function


def _helper(model: Callable[P, R]) -> Callable[P, R]:
    """onchip.ops' X_forward, of what stands beside the recurrences, as X."""
    name = model.__name__.removesuffix("_forward")
    op, parameters = HELPERS[name], _Parameters.of(model)

    def function(*args: Any, **kwargs: Any) -> Any:
        return _help(op, parameters.bind(args, kwargs))

    _dress(function, name, model, _HELPED)
    return function


def _in_place(model: Callable[P, R]) -> Callable[P, R]:
    """onchip.ops' X_step."""
    name = model.__name__.removesuffix("_step")
    op: RegisteredOperator = OPERATORS[name] if name in OPERATORS else HELPERS[name]
    parameters = _Parameters.of(model)

    def function(*args: Any, **kwargs: Any) -> Any:
        return _step(op, parameters.bind(args, kwargs))

    _dress(function, model.__name__, model, _IN_PLACE.format(name=name))
    return function


linear_attention = _differentiable(ops.linear_attention_forward)
linear_attention_step = _in_place(ops.linear_attention_step)
retention = _differentiable(ops.retention_forward)
retention_step = _in_place(ops.retention_step)
lightning_attention = _differentiable(ops.lightning_attention_forward)
lightning_attention_step = _in_place(ops.lightning_attention_step)
simple_gla = _differentiable(ops.simple_gla_forward)
simple_gla_step = _in_place(ops.simple_gla_step)
mamba2 = _differentiable(ops.mamba2_forward)
mamba2_step = _in_place(ops.mamba2_step)
mlstm_step = _in_place(ops.mlstm_step)
gla = _differentiable(ops.gla_forward)
gla_step = _in_place(ops.gla_step)
rwkv6 = _differentiable(ops.rwkv6_forward)
rwkv6_step = _in_place(ops.rwkv6_step)
hgrn2 = _differentiable(ops.hgrn2_forward)
hgrn2_step = _in_place(ops.hgrn2_step)
delta_rule = _differentiable(ops.delta_rule_forward)
delta_rule_step = _in_place(ops.delta_rule_step)
gated_delta_rule = _differentiable(ops.gated_delta_rule_forward)
gated_delta_rule_step = _in_place(ops.gated_delta_rule_step)
kda = _differentiable(ops.kda_forward)
kda_step = _in_place(ops.kda_step)
comba = _differentiable(ops.comba_forward)
comba_step = _in_place(ops.comba_step)
gdn2 = _differentiable(ops.gdn2_forward)
gdn2_step = _in_place(ops.gdn2_step)
gated_delta_product = _differentiable(ops.gated_delta_product_forward)
gated_delta_product_step = _in_place(ops.gated_delta_product_step)
rwkv7 = _differentiable(ops.rwkv7_forward)
rwkv7_step = _in_place(ops.rwkv7_step)
iplr = _differentiable(ops.iplr_forward)
iplr_step = _in_place(ops.iplr_step)
gsa = _differentiable(ops.gsa_forward)
gsa_step = _in_place(ops.gsa_step)
hgrn = _differentiable(ops.hgrn_forward)
hgrn_step = _in_place(ops.hgrn_step)
mamba1 = _differentiable(ops.mamba1_forward)
mamba1_step = _in_place(ops.mamba1_step)
rwkv4 = _differentiable(ops.rwkv4_forward)
rwkv4_step = _in_place(ops.rwkv4_step)
causal_conv1d = _helper(ops.causal_conv1d_forward)
causal_conv1d_step = _in_place(ops.causal_conv1d_step)
l2norm = _helper(ops.l2norm_forward)
rms_norm_gated = _helper(ops.rms_norm_gated_forward)


def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    gate: str = "exp",
    normalize: bool | None = None,
    eps: float = 0.0,
    detach_normalizer: bool = False,
    scale: float | None = None,
    initial_state: Tensor | Sequence[Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    seqlens: Tensor | Sequence[int] | None = None,
    chunk_len: int | None = None,
    state_layout: str = "kv",
    check: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Any]:
    """The matrix memory of the xLSTM: onchip.ops.mlstm_forward, and one option more.

    Args:
        detach_normalizer: backward takes the denominator as a constant, as published kernels do (a
            norm behind the operator cancels its gradient); all else stays exact.
        The tensors and other options: as for onchip.ops.mlstm_forward.

    Returns:
        (o, final_state or None), as onchip.ops.mlstm_forward's.

    Differentiable once in every tensor and in the initial state, through o, C and n. The final m
    has no gradient: nothing depends on it but through C and n, whose true values are e^m C and e^m
    n. Under autocast q, k and v are cast to its dtype, float64 excepted; gates and states keep
    theirs.
    """
    return _forward(
        OPERATORS["mlstm"],
        dict(
            q=q,
            k=k,
            v=v,
            i=i,
            f=f,
            gate=gate,
            normalize=normalize,
            eps=eps,
            detach_normalizer=detach_normalizer,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            seqlens=seqlens,
            chunk_len=chunk_len,
            state_layout=state_layout,
            check=check,
            backend=backend,
        ),
    )
