"""Attention over a cache, for inference: `torch.ops.onchip.attention_decode` and its caller."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onchip import _calls
from onchip._values import flag
from onchip.errors import Unsupported
from onchip.torch import _run
from onchip.torch._arguments import (
    VALUES,
    are_plain,
    checked,
    integers,
    is_watched,
    refuse_tangents,
    require_tensor,
)
from onchip.torch._library import define, written

_OP = _calls.ATTENTION_DECODE
_TENSORS = (*_OP.arrays, *_OP.index_arrays, *_OP.optional_arrays, *_OP.integer_arrays)
_REQUIRED = (*_OP.arrays, "cache_seqlens")
_SEQUENCES = (*_OP.index_arrays, *_OP.integer_arrays)
_VALUES = {name: kind for name, kind in VALUES.items() if name != "dropout_p"}
_VALUES["rotary_interleaved"] = "bool"
_COUNT = len(_TENSORS)


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | Sequence[int],
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    page_table: Tensor | None = None,
    cache_slot: Tensor | Sequence[int] | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    q_positions: Tensor | None = None,
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
    """Exact attention of new queries over keys and values in a cache, to which the call may append.

    The arguments and results of `onchip.ops.attention_decode`, on PyTorch tensors; k_cache and
    v_cache are written in place where k_new is given. It is for inference: a tensor that requires
    grad is refused unless under `torch.no_grad()`. Under `torch.compile` the operator
    `torch.ops.onchip.attention_decode` stands in the graph and says that it writes the caches.

    Returns:
        o, or with return_lse (o, lse).
    """
    window_left, window_right = _calls.window_bounds(_OP.name, window)
    return_lse = flag(_OP.name, "return_lse", return_lse)
    given = dict(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        cache_seqlens=cache_seqlens,
        page_table=page_table,
        cache_slot=cache_slot,
        k_new=k_new,
        v_new=v_new,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        bias=bias,
        mask=mask,
        alibi_slopes=alibi_slopes,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        sink=sink,
        q_positions=q_positions,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        seqlens_q=seqlens_q,
        seqlens_kv=seqlens_kv,
    )
    tensors = tuple(_tensor(name, given[name]) for name in _TENSORS)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise Unsupported(
            f"{_OP.name}: got a tensor that requires grad, and attention over a cache has no "
            "gradient: call it under torch.no_grad() (onchip.torch.attention has gradients)"
        )
    values = (
        scale,
        causal,
        alignment,
        window_left,
        window_right,
        softcap,
        max_seqlen_q,
        max_seqlen_kv,
        precision,
        deterministic,
        batch_invariant,
        check,
        backend,
        rotary_interleaved,
    )
    if are_plain(tensors) and not is_watched(q):
        o, lse = _decode(*tensors, *values)
    else:
        values = checked(_OP.name, _VALUES, values)
        o, lse = torch.ops.onchip.attention_decode(*tensors, *values)
    return (o, lse) if return_lse else o


def _tensor(name: str, value: Any) -> Tensor | None:
    if value is None and name not in _REQUIRED:
        return None
    if name in _SEQUENCES:
        dtype = torch.int32 if name in _OP.index_arrays else torch.int64
        return integers(_OP.name, name, value, dtype)
    return require_tensor(_OP.name, name, value)


# ---- the registered operator ---------------------------------------------------------------------


def _decode(*arguments: Any) -> tuple[Tensor, Tensor]:
    """In the order of the schema."""
    tensors = arguments[:_COUNT]
    refuse_tangents(_OP.name, tensors)
    given = _run.detached(_TENSORS, tensors)
    given |= dict(zip(_VALUES, arguments[_COUNT:], strict=True))
    results = _calls.run(_OP, given)
    if given["k_new"] is not None:
        written(arguments[_TENSORS.index(name)] for name in _OP.in_place)
    return results["o"], results["lse"]


def _decode_shapes(*arguments: Any) -> tuple[Tensor, Tensor]:
    q, v_cache = arguments[0], arguments[2]
    o = q.new_empty((*q.shape[:-1], v_cache.shape[-1]))
    return o, q.new_empty(_calls.lse_shape(q.shape), dtype=_run.lse_dtype(q))


def _kind(name: str) -> str:
    if name in _OP.in_place:
        return "Tensor(a!)" if name == "k_cache" else "Tensor(b!)"
    return "Tensor" if name in _REQUIRED else "Tensor?"


define(
    _OP.name,
    (
        *(f"{_kind(name)} {name}" for name in _TENSORS),
        *(f"{kind} {name}" for name, kind in _VALUES.items()),
    ),
    2,
    _decode,
    _decode_shapes,
)
