"""The operators as PyTorch functions, on CUDA and CPU tensors.

    import onchip.torch
    o = onchip.torch.attention(q, k, v, causal=True)

Results come from PyTorch's allocators and work goes to its current stream, without waiting for the
GPU: calls may be captured in a CUDA graph and replayed. Inside `torch.compile` the operator
`torch.ops.onchip.attention_forward` stands in the graph.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onchip import _calls, _native
from onchip.errors import InvalidArgument, Unsupported

__all__ = ["attention"]

_OP = _calls.ATTENTION_FORWARD


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_segment_ids: Tensor | None = None,
    kv_segment_ids: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_rng: Tensor | Sequence[int] | None = None,
    cu_seqlens_q: Tensor | Sequence[int] | None = None,
    cu_seqlens_kv: Tensor | Sequence[int] | None = None,
    seqlens_q: Tensor | Sequence[int] | None = None,
    seqlens_kv: Tensor | Sequence[int] | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    precision: str | None = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    check: bool = False,
    backend: str | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention: O = softmax(mask(softcap(scale Q K^T) + bias - alibi)) V.

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim_qk], float; packed (with cu_seqlens_q) [total_q,
            num_heads_q, head_dim_qk].
        k: [batch, seqlen_kv, num_heads_kv, head_dim_qk], packed likewise, q's dtype.
        v: [batch, seqlen_kv, num_heads_kv, head_dim_v], packed likewise, q's dtype.
        The options: as those of `onchip.ops.attention_forward`. Sequences of integers in place of
            tensors lie in host memory, which a CUDA graph cannot read: give tensors on q's device
            to a call that is captured.
        return_lse: also return lse.

    Returns:
        o, or (o, lse): o [batch, seqlen_q, num_heads_q, head_dim_v] or packed, contiguous; lse
        [batch, num_heads_q, seqlen_q] or packed [num_heads_q, total_q], float32 (float64 for
        float64), the natural log of each row's softmax denominator.

    Raises onchip.Unsupported where a gradient would be needed: there is no backward yet. Call it
    under `torch.no_grad()`, or on detached tensors.
    """
    try:
        window_left, window_right = window
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"{_OP.name}: window: got {window!r}, wanted (left, right), -1 for no bound"
        ) from None
    tensors = (
        q,
        k,
        v,
        bias,
        mask,
        alibi_slopes,
        q_segment_ids,
        kv_segment_ids,
        sink,
        None if dropout_rng is None else _integers("dropout_rng", dropout_rng),
        None if cu_seqlens_q is None else _integers("cu_seqlens_q", cu_seqlens_q),
        None if cu_seqlens_kv is None else _integers("cu_seqlens_kv", cu_seqlens_kv),
        None if seqlens_q is None else _integers("seqlens_q", seqlens_q),
        None if seqlens_kv is None else _integers("seqlens_kv", seqlens_kv),
    )
    values = (
        scale,
        causal,
        alignment,
        window_left,
        window_right,
        softcap,
        dropout_p,
        max_seqlen_q,
        max_seqlen_kv,
        precision,
        deterministic,
        batch_invariant,
        check,
        backend,
    )
    grad_enabled = torch.is_grad_enabled()
    plain = True
    for index, tensor in enumerate(tensors):
        if tensor is None and index >= len(_OP.arrays):
            continue
        if not isinstance(tensor, Tensor):
            raise InvalidArgument(f"{_OP.name}: got {type(tensor).__name__}, wanted torch tensors")
        if grad_enabled and tensor.requires_grad:
            raise Unsupported(
                f"{_OP.name}: got a tensor that requires grad, and onchip.torch has no backward "
                "yet: call it under torch.no_grad() or on detached tensors"
            )
        plain = plain and type(tensor) in _PLAIN_TYPES
    # On the host, PyTorch's dispatcher would take longer than all the rest. It is needed where
    # somebody watches it, or where the tensors are not plain memory.
    if torch.compiler.is_compiling() or not plain or _is_watched() or not (q.is_cuda or q.is_cpu):
        o, lse = torch.ops.onchip.attention_forward(*tensors, *values, return_lse)
        return (o, lse) if return_lse else o
    return _run(tensors, values, return_lse)


def _integers(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, (list, tuple, range)):
        raise InvalidArgument(
            f"{_OP.name}: {name}: got {type(value).__name__}, "
            "wanted a tensor or a sequence of integers"
        )
    try:
        integers = [x if isinstance(x, int) else operator.index(x) for x in value]
        return torch.tensor(integers, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidArgument(
            f"{_OP.name}: {name}: got a {type(value).__name__} ({error}), "
            "wanted integers of 64 bits or an integer tensor"
        ) from None


_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def _no_modes_known() -> int:
    return 1


# How many TorchDispatchModes are on: fake tensors, tracing, selective checkpointing, counters.
_is_watched = getattr(torch._C, "_len_torch_dispatch_stack", _no_modes_known)

_TENSOR_NAMES = (*_OP.arrays, *_OP.optional_arrays, *_OP.integer_arrays)
_VALUES = {
    "scale": "float?",
    "causal": "bool",
    "alignment": "str",
    "window_left": "int",
    "window_right": "int",
    "softcap": "float",
    "dropout_p": "float",
    "max_seqlen_q": "int?",
    "max_seqlen_kv": "int?",
    "precision": "str?",
    "deterministic": "bool",
    "batch_invariant": "bool",
    "check": "bool",
    "backend": "str?",
}


def _run(tensors: Any, values: Any, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """What `_calls.run` does, in as few steps on the host as can be: a GPU runs small calls faster
    than Python prepares them. Whatever is out of the ordinary goes to `_calls.run`."""
    q, _, v = tensors[:3]
    rank = q.dim()
    if v.dim() != rank or not 3 <= rank <= 4:
        return _run_any(tensors, values, return_lse)
    stream = _current_stream(q.get_device()) if q.is_cuda else 0
    arguments = dict(zip(_VALUES, values, strict=True))
    for name, tensor in zip(_TENSOR_NAMES, tensors, strict=True):
        if tensor is None:
            continue
        if tensor.requires_grad:
            tensor = tensor.detach()
        view = _native.tensor(_OP.name, name, tensor, None, False, stream)
        if view.layout_problem is not None or tensor.is_neg():
            return _run_any(tensors, values, return_lse)
        arguments[name] = view
    shape = q.shape
    dim_v = v.shape[-1]
    if dim_v == shape[-1] and q.is_contiguous():
        o = torch.empty_like(q)
    else:
        o = q.new_empty((*shape[:-1], dim_v))
    arguments["o"] = _native.tensor(_OP.name, "o", o, None, True, stream)
    if return_lse:
        lse = q.new_empty(_calls.lse_shape(shape), dtype=_lse_dtype(q))
        arguments["lse"] = _native.tensor(_OP.name, "lse", lse, None, True, stream)
    call = _native.Call(_OP.name, arguments)
    call.plan()
    workspace = None
    if call.workspace_bytes:
        length = call.workspace_bytes + call.workspace_alignment - 1
        made = q.new_empty((length,), dtype=torch.bool)
        workspace = _native.tensor(_OP.name, "workspace", made, None, True, stream)
    call.run(workspace, stream)
    return (o, lse) if return_lse else o


def _run_any(tensors: Any, values: Any, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    arguments = dict(zip(_VALUES, values, strict=True))
    for name, tensor in zip(_TENSOR_NAMES, tensors, strict=True):
        arguments[name] = None if tensor is None else tensor.detach()
    results = _calls.run(_OP, arguments, () if return_lse else ("lse",))
    return (results["o"], results["lse"]) if return_lse else results["o"]


def _default_current_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


# The stream's number without an object made for it.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _default_current_stream)


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


# ---- the registered operator ---------------------------------------------------------------------


def _registered(*arguments: Any) -> tuple[Tensor, Tensor]:
    """In the order of the schema. Without return_lse, lse has no elements."""
    count = len(_TENSOR_NAMES)
    result = _run(arguments[:count], arguments[count:-1], arguments[-1])
    return result if isinstance(result, tuple) else (result, _no_lse(result))


def _no_lse(q: Tensor) -> Tensor:
    return q.new_empty((0,), dtype=_lse_dtype(q))


def _shapes_alone(*arguments: Any) -> tuple[Tensor, Tensor]:
    q, _, v = arguments[:3]
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    if not arguments[-1]:
        return o, _no_lse(q)
    return o, q.new_empty(_calls.lse_shape(q.shape), dtype=_lse_dtype(q))


_SCHEMA = ", ".join(
    [f"Tensor {name}" for name in _OP.arrays]
    + [f"Tensor? {name}" for name in _TENSOR_NAMES[len(_OP.arrays) :]]
    + [f"{kind} {name}" for name, kind in _VALUES.items()]
    + ["bool return_lse"]
)
_library = torch.library.Library("onchip", "DEF")
_library.define(
    f"attention_forward({_SCHEMA}) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,)
)
for _device in ("CPU", "CUDA"):
    _library.impl("attention_forward", _registered, _device)
torch.library.register_fake("onchip::attention_forward", _shapes_alone, lib=_library)
