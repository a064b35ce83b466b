"""Forward and backward on plain tensors: what `_calls.run` does, in as few steps on the host as can
be, since a GPU runs small calls faster than Python prepares them. Whatever is out of the ordinary
goes to `_calls.run`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onchip import _calls, _native
from onchip.torch._arguments import (
    BACKWARD,
    FORWARD,
    GRADIENT_INDICES,
    GRADIENTS,
    PLAIN_TYPES,
    REQUIRED,
    TENSOR_NAMES,
    VALUES,
)

Tensors = tuple[Tensor | None, ...]
Values = tuple[Any, ...]

_SAVED = ("d_o", "o", "lse", "d_lse")
_FORWARD = _native.TorchCall(
    FORWARD.name, TENSOR_NAMES, ("o", "lse"), tuple(VALUES), REQUIRED, PLAIN_TYPES
)
_BACKWARD = _native.TorchCall(
    BACKWARD.name, (*_SAVED, *TENSOR_NAMES), GRADIENTS, tuple(VALUES), REQUIRED, PLAIN_TYPES
)

# Whether one of the forward's tensors requires grad; None if one is not plain.
examine = _FORWARD.examine


def lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _allocator(q: Tensor) -> Callable[[int], Tensor]:
    return lambda length: q.new_empty((length,), dtype=torch.bool)


def forward_in_place(
    tensors: Tensors, values: Values, want_lse: bool
) -> tuple[Tensor, Tensor | None] | None:
    """Where the C library takes every tensor's memory as it is; else None."""
    q, v = tensors[0], tensors[2]
    assert q is not None and v is not None
    shape = q.shape
    rank = len(shape)
    if v.dim() != rank or not 3 <= rank <= 4:
        return None
    dim_v = v.size(-1)
    if dim_v == shape[-1] and q.is_contiguous():
        o = torch.empty_like(q)
    else:
        o = q.new_empty((*shape[:-1], dim_v))
    lse = q.new_empty(_calls.lse_shape(shape), dtype=lse_dtype(q)) if want_lse else None
    return (o, lse) if _FORWARD.run(tensors, (o, lse), values, _allocator(q)) else None


def forward(tensors: Tensors, values: Values, want_lse: bool) -> tuple[Tensor, Tensor | None]:
    results = forward_in_place(tensors, values, want_lse)
    if results is not None:
        return results
    arguments = dict(zip(VALUES, values, strict=True)) | detached(TENSOR_NAMES, tensors)
    made = _calls.run(FORWARD, arguments, () if want_lse else ("lse",))
    return made["o"], made.get("lse")


def detached(names: Sequence[str], tensors: Sequence[Tensor | None]) -> dict[str, Any]:
    return {
        name: None if tensor is None else tensor.detach()
        for name, tensor in zip(names, tensors, strict=True)
    }


def backward(
    d_o: Tensor,
    o: Tensor,
    lse: Tensor,
    d_lse: Tensor | None,
    tensors: Tensors,
    values: Values,
    wanted: Sequence[bool],
) -> Sequence[Tensor | None]:
    """The gradients of DIFFERENTIABLE, None where not wanted."""
    q = tensors[0]
    assert q is not None
    given = (d_o, o, lse, d_lse, *tensors)
    gradients = tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format)
        if want and (x := tensors[index]) is not None
        else None
        for index, want in zip(GRADIENT_INDICES, wanted, strict=True)
    )
    if _BACKWARD.run(given, gradients, values, _allocator(q)):
        return gradients
    names = (*_SAVED, *TENSOR_NAMES)
    arguments = dict(zip(VALUES, values, strict=True)) | detached(names, given)
    unwanted = [name for name, want in zip(GRADIENTS, wanted, strict=True) if not want]
    results = _calls.run(BACKWARD, arguments, unwanted)
    return [results.get(name) for name in GRADIENTS]
