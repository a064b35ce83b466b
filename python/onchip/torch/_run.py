"""Forward and backward on plain tensors: what `_calls.run` does, in as few steps on the host as can
be, since a GPU runs small calls faster than Python prepares them. Whatever is out of the ordinary
goes to `_calls.run`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onchip import _calls, _native
from onchip.torch._arguments import (
    BACKWARD,
    DIFFERENTIABLE,
    FORWARD,
    GRADIENTS,
    TENSOR_NAMES,
    VALUES,
)

Tensors = Sequence[Tensor | None]
Values = Sequence[Any]


def _default_current_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


# The stream's number without an object made for it.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _default_current_stream)


def lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _stream(q: Tensor) -> int:
    return _current_stream(q.get_device()) if q.is_cuda else 0


def _add_views(
    op: str, arguments: dict[str, Any], names: Sequence[str], tensors: Tensors, stream: int
) -> bool:
    """Whether the C library takes every tensor's memory as it is."""
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is None:
            continue
        if tensor.requires_grad:
            tensor = tensor.detach()
        view = _native.tensor(op, name, tensor, None, False, stream)
        if view.layout_problem is not None or tensor.is_neg():
            return False
        arguments[name] = view
    return True


def _finish(op: str, arguments: dict[str, Any], q: Tensor, stream: int) -> None:
    call = _native.Call(op, arguments)
    call.plan()
    workspace = None
    if call.workspace_bytes:
        length = call.workspace_bytes + call.workspace_alignment - 1
        made = q.new_empty((length,), dtype=torch.bool)
        workspace = _native.tensor(op, "workspace", made, None, True, stream)
    call.run(workspace, stream)


def forward(tensors: Tensors, values: Values, want_lse: bool) -> tuple[Tensor, Tensor | None]:
    q, _, v = tensors[:3]
    assert q is not None and v is not None
    rank = q.dim()
    stream = _stream(q)
    arguments = dict(zip(VALUES, values, strict=True))
    if (
        v.dim() != rank
        or not 3 <= rank <= 4
        or not _add_views(FORWARD.name, arguments, TENSOR_NAMES, tensors, stream)
    ):
        return _forward_of_any_layout(tensors, values, want_lse)
    shape = q.shape
    dim_v = v.shape[-1]
    if dim_v == shape[-1] and q.is_contiguous():
        o = torch.empty_like(q)
    else:
        o = q.new_empty((*shape[:-1], dim_v))
    arguments["o"] = _native.tensor(FORWARD.name, "o", o, None, True, stream)
    lse = None
    if want_lse:
        lse = q.new_empty(_calls.lse_shape(shape), dtype=lse_dtype(q))
        arguments["lse"] = _native.tensor(FORWARD.name, "lse", lse, None, True, stream)
    _finish(FORWARD.name, arguments, q, stream)
    return o, lse


def detached(names: Sequence[str], tensors: Tensors) -> dict[str, Any]:
    return {
        name: None if tensor is None else tensor.detach()
        for name, tensor in zip(names, tensors, strict=True)
    }


def _forward_of_any_layout(
    tensors: Tensors, values: Values, want_lse: bool
) -> tuple[Tensor, Tensor | None]:
    arguments = dict(zip(VALUES, values, strict=True)) | detached(TENSOR_NAMES, tensors)
    results = _calls.run(FORWARD, arguments, () if want_lse else ("lse",))
    return results["o"], results.get("lse")


_SAVED = ("d_o", "o", "lse", "d_lse")


def backward(
    d_o: Tensor,
    o: Tensor,
    lse: Tensor,
    d_lse: Tensor | None,
    tensors: Tensors,
    values: Values,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of DIFFERENTIABLE, None where not wanted."""
    q = tensors[0]
    assert q is not None
    names = (*_SAVED, *TENSOR_NAMES)
    given = (d_o, o, lse, d_lse, *tensors)
    stream = _stream(q)
    arguments = dict(zip(VALUES, values, strict=True))
    if not _add_views(BACKWARD.name, arguments, names, given, stream):
        arguments = dict(zip(VALUES, values, strict=True)) | detached(names, given)
        unwanted = [name for name, want in zip(GRADIENTS, wanted, strict=True) if not want]
        results = _calls.run(BACKWARD, arguments, unwanted)
        return [results.get(name) for name in GRADIENTS]
    gradients: list[Tensor | None] = []
    for name, want in zip(DIFFERENTIABLE, wanted, strict=True):
        made = None
        if want:
            x = tensors[TENSOR_NAMES.index(name)]
            assert x is not None
            made = torch.empty_like(x, memory_format=torch.contiguous_format)
            arguments["d" + name] = _native.tensor(
                BACKWARD.name, "d" + name, made, None, True, stream
            )
        gradients.append(made)
    _finish(BACKWARD.name, arguments, q, stream)
    return gradients
