"""attention_forward and attention_backward in `torch.ops.onchip` with their fake kernels, and what
autograd does at either: through the dispatcher, or in a Function where nobody watches."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onchip import _calls
from onchip.errors import InvalidArgument, Unsupported
from onchip.torch import _run
from onchip.torch._arguments import (
    BACKWARD,
    DIFFERENTIABLE,
    FORWARD,
    GRADIENT_INDICES,
    NO_FORWARD_MODE,
    REQUIRED,
    TENSOR_NAMES,
    VALUES,
    are_plain,
    checked,
    is_watched,
    is_watched_eagerly,
    refuse_tangents,
    require_tensors,
    transforms_active,
)
from onchip.torch._library import LIBRARY, define

_COUNT = len(TENSOR_NAMES)
_SLOPES = TENSOR_NAMES.index("alibi_slopes")

# ---- forward -------------------------------------------------------------------------------------


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """In the order of the schema."""
    tensors = arguments[:_COUNT]
    refuse_tangents(FORWARD.name, tensors)
    o, lse = _run.forward(tensors, arguments[_COUNT:], True)
    assert lse is not None
    return o, lse


def _forward_shapes(*arguments: Any) -> tuple[Tensor, Tensor]:
    q, _, v = arguments[:3]
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return o, q.new_empty(_calls.lse_shape(q.shape), dtype=_run.lse_dtype(q))


# ---- backward ------------------------------------------------------------------------------------

# The operator's arguments: d_o, o, lse, d_lse, the forward's, then which gradients are wanted.
_SAVED = 4


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    """A gradient that is not wanted has no elements."""
    saved, tensors = arguments[:_SAVED], arguments[_SAVED : _SAVED + _COUNT]
    values, wanted = arguments[_SAVED + _COUNT : -1], arguments[-1]
    refuse_tangents(BACKWARD.name, (*saved, *tensors))
    d_o, o, lse, d_lse = saved
    gradients = _run.backward(d_o, o, lse, d_lse, tensors, values, wanted)
    q = tensors[0]
    return tuple(q.new_empty((0,)) if x is None else x for x in gradients)


def _backward_shapes(*arguments: Any) -> tuple[Tensor, ...]:
    tensors, wanted = arguments[_SAVED : _SAVED + _COUNT], arguments[-1]
    return tuple(
        torch.empty_like(tensors[index], memory_format=torch.contiguous_format)
        if want
        else tensors[0].new_empty((0,))
        for index, want in zip(GRADIENT_INDICES, wanted, strict=True)
    )


def _refuse_second_derivatives(*_: Any) -> Any:
    raise Unsupported(
        f"{BACKWARD.name}: got a gradient to differentiate again (create_graph=True, or a nested "
        "transform of torch.func), and attention has no second derivative: use first derivatives, "
        "or the plain formula in torch where second ones are needed"
    )


# ---- autograd ------------------------------------------------------------------------------------


def _refuse_slopes() -> Any:
    raise InvalidArgument(
        f"{FORWARD.name}: alibi_slopes: got a tensor that requires grad, wanted one that does "
        "not (slopes have no gradient: detach them, or build a bias)"
    )


def _save(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> None:
    if ctx.needs_input_grad[_SLOPES]:
        _refuse_slopes()
    ctx.set_materialize_grads(False)  # an lse that no loss uses costs nothing
    ctx.save_for_backward(*inputs[:_COUNT], *output)
    ctx.values = inputs[_COUNT:]


def is_batched(*cotangents: Tensor | None) -> bool:
    """By `is_grads_batched`, whose tensors torch.func does not know of."""
    is_batched = torch._C._functorch.is_legacy_batchedtensor
    return any(x is not None and is_batched(x) for x in cotangents)


def _gradients(
    ctx: Any, d_o: Tensor | None, d_lse: Tensor | None, wanted: list[bool]
) -> Sequence[Tensor | None]:
    """Of DIFFERENTIABLE; what is not wanted is anything."""
    if d_o is None and d_lse is None:
        return (None,) * len(wanted)
    *tensors, o, lse = ctx.saved_tensors
    # torch.func always asks for a graph of the gradient; whoever uses it meets the refusal then.
    transformed = getattr(ctx, "transformed", False)
    if torch.is_grad_enabled() and not transformed:
        _refuse_second_derivatives()
    if d_o is None:
        # One row in memory, repeated.
        d_o = o.new_zeros(o.shape[-1:]).expand(o.shape)
    saved = (d_o, o, lse, d_lse)
    gradients: Sequence[Tensor | None]
    if transformed:
        gradients = _TransformedBackward.apply(*saved, *tensors, *ctx.values, wanted)
    elif are_plain((*saved, *tensors)) and not (is_watched(d_o) or is_batched(d_o, d_lse)):
        refuse_tangents(BACKWARD.name, (*saved, *tensors))
        gradients = _run.backward(d_o, o, lse, d_lse, tuple(tensors), ctx.values, wanted)
    else:
        gradients = torch.ops.onchip.attention_backward(*saved, *tensors, *ctx.values, wanted)
    return gradients


def _differentiate(ctx: Any, d_o: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
    """Of the operator's arguments."""
    wanted = [ctx.needs_input_grad[index] for index in GRADIENT_INDICES]
    results: list[Tensor | None] = [None] * (_COUNT + len(VALUES))
    gradients = _gradients(ctx, d_o, d_lse, wanted)
    for index, want, gradient in zip(GRADIENT_INDICES, wanted, gradients, strict=True):
        if want:
            results[index] = gradient
    return tuple(results)


class _Attention(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """`torch.ops.onchip.attention_forward` without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        results = _forward(*arguments)
        _save(ctx, arguments, results)
        return results

    backward = staticmethod(_differentiate)


class _Recorded(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """A call that has been made already, for autograd to know of. Its arguments are few, since each
    takes time: those that can have a gradient, and all of the call's as one."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        tensors, values, results = arguments[-1]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *results)
        ctx.values = values
        return results  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, d_o: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad[:-1]
        gradients = _gradients(ctx, d_o, d_lse, wanted)
        made = (x if want else None for x, want in zip(gradients, wanted, strict=True))
        return (*made, None)


# Function.apply itself first looks for torch.func's transforms and what they have left behind,
# which are no part of a call whose tensors were found to be plain memory.
_record = super(torch.autograd.Function, _Recorded).apply


def _refuse_jvp(*_: Any) -> Any:
    raise Unsupported(f"{FORWARD.name}: {NO_FORWARD_MODE}")


class _Transformed(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """The form that torch.func can transform: grad, vjp, jacrev, vmap, and their nesting."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.onchip.attention_forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _save(ctx, inputs, output)
        ctx.transformed = True

    backward = staticmethod(_differentiate)
    jvp = staticmethod(_refuse_jvp)


class _TransformedBackward(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.onchip.attention_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    backward = staticmethod(_refuse_second_derivatives)
    jvp = staticmethod(_refuse_jvp)


_differentiable = operator.itemgetter(*GRADIENT_INDICES)


def run(tensors: Any, values: Any, want_lse: bool) -> Any:
    """(o, lse) by the shortest way; lse may be None where it is not wanted."""
    compiling = torch.compiler.is_compiling()
    if not compiling:
        requires_grad = _run.examine(tensors)
        if requires_grad is not None and not is_watched_eagerly(tensors[0]):
            refuse_tangents(FORWARD.name, tensors)
            if not requires_grad or not torch.is_grad_enabled():
                return _run.forward(tensors, values, want_lse)
            slopes = tensors[_SLOPES]
            if slopes is not None and slopes.requires_grad:
                _refuse_slopes()
            results = _run.forward_in_place(tensors, values, True)
            if results is None:
                return _Attention.apply(*tensors, *values)
            return _record(*_differentiable(tensors), (tensors, values, results))
    require_tensors(tensors)
    values = checked(FORWARD.name, VALUES, values)
    if not compiling and transforms_active():
        return _Transformed.apply(*tensors, *values)
    return torch.ops.onchip.attention_forward(*tensors, *values)


# ---- registration --------------------------------------------------------------------------------


_ARGUMENTS = (
    *(f"Tensor {name}" for name in TENSOR_NAMES[:REQUIRED]),
    *(f"Tensor? {name}" for name in TENSOR_NAMES[REQUIRED:]),
    *(f"{kind} {name}" for name, kind in VALUES.items()),
)
define(FORWARD.name, _ARGUMENTS, 2, _forward, _forward_shapes)
define(
    BACKWARD.name,
    (
        *("Tensor d_o", "Tensor o", "Tensor lse", "Tensor? d_lse"),
        *_ARGUMENTS,
        f"bool[{len(DIFFERENTIABLE)}] wanted",
    ),
    len(DIFFERENTIABLE),
    _backward,
    _backward_shapes,
)
torch.library.register_autograd(
    f"onchip::{FORWARD.name}", _differentiate, setup_context=_save, lib=LIBRARY
)
torch.library.register_autograd(f"onchip::{BACKWARD.name}", _refuse_second_derivatives, lib=LIBRARY)
