"""The functions of the package flash_attn (2.x), for PyTorch tensors.

    from onchip.compat.flash_attn import flash_attn_func

Same layouts, argument orders and alignment (bottom-right: the last query sees the last key).
What differs:
- Tensors may lie on the CPU, be float32 or float64, and have any strides and head dims to 256.
- return_attn_probs gives (o, softmax_lse, None): softmax_lse is differentiable, and -inf for a row
  that sees no key. The probabilities are not computed anywhere; with dropout, where flash_attn
  would return them, the request is refused.
- Dropout draws from PyTorch's default generator, but its mask is onchip's.
- alibi_slopes may have any float dtype. flash_attn_varlen_func takes no block_table, and
  flash_attn_with_kvcache neither cache_leftpad nor a number of splits.
- max_seqlen_q and max_seqlen_k are hints: a wrong one changes no result.
"""

from typing import Any, TypeAlias

import torch
from torch import Tensor

from onchip._values import flag, integer, number, pair, refuse
from onchip.errors import InvalidArgument, Unsupported
from onchip.torch._arguments import require_tensor
from onchip.torch._attention import attention
from onchip.torch._decode import attention_decode
from onchip.torch._random import draw_dropout_rng

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result: TypeAlias = Tensor | tuple[Tensor, Tensor, None]


def _attend(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    **lengths: Any,
) -> Result:
    dropout_p = number(name, "dropout_p", dropout_p)
    if softmax_scale is not None:
        softmax_scale = number(name, "softmax_scale", softmax_scale)
    window_size = _window(name, window_size)
    return_attn_probs = flag(name, "return_attn_probs", return_attn_probs)
    require_tensor(name, "q", q)
    if return_attn_probs and dropout_p > 0:
        raise Unsupported(
            f"{name}: return_attn_probs: got True with dropout_p {dropout_p}, wanted dropout_p 0: "
            "onchip never holds the probabilities (without dropout the call returns the "
            "log-sum-exp)"
        )
    o, lse = attention(
        q,
        k,
        v,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        dropout_rng=draw_dropout_rng(q.device) if dropout_p > 0 else None,
        deterministic=deterministic,
        return_lse=True,
        **lengths,
    )
    return (o, lse, None) if return_attn_probs else o


def _window(name: str, window_size: Any) -> tuple[int, int]:
    left, right = pair(name, "window_size", window_size, "(left, right), -1 for no bound")
    return integer(name, "window_size", left), integer(name, "window_size", right)


def _unpacked(name: str, argument: str, packed: Tensor, count: int) -> tuple[Tensor, ...]:
    """Views of the parts along the axis before heads."""
    if not isinstance(packed, Tensor) or packed.dim() < 3 or packed.shape[-3] != count:
        got = list(packed.shape) if isinstance(packed, Tensor) else type(packed).__name__
        raise InvalidArgument(
            f"{name}: {argument}: got {got}, wanted [..., {count}, heads, head_dim]"
        )
    return tuple(packed.unbind(-3))


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """q [batch, seqlen_q, heads_q, head_dim], k and v [batch, seqlen_kv, heads_kv, head_dim].

    Returns o, or with return_attn_probs (o, softmax_lse [batch, heads_q, seqlen_q], None).
    """
    return _attend(
        "flash_attn_func",
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_func with kv [batch, seqlen_kv, 2, heads_kv, head_dim]."""
    name = "flash_attn_kvpacked_func"
    k, v = _unpacked(name, "kv", kv, 2)
    return _attend(
        name,
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_func with qkv [batch, seqlen, 3, heads, head_dim]."""
    name = "flash_attn_qkvpacked_func"
    q, k, v = _unpacked(name, "qkv", qkv, 3)
    return _attend(
        name,
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Packed sequences: q [total_q, heads_q, head_dim], k and v [total_kv, heads_kv, head_dim];
    sequence n is rows cu_seqlens[n] to cu_seqlens[n + 1].

    Returns o, or with return_attn_probs (o, softmax_lse [heads_q, total_q], None).
    """
    name = "flash_attn_varlen_func"
    if block_table is not None:
        raise Unsupported(f"{name}: block_table: got a table, wanted None: keys in one tensor")
    return _attend(
        name,
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_k,
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_varlen_func with kv [total_kv, 2, heads_kv, head_dim]."""
    name = "flash_attn_varlen_kvpacked_func"
    k, v = _unpacked(name, "kv", kv, 2)
    return _attend(
        name,
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_k,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_varlen_func with qkv [total, 3, heads, head_dim]."""
    name = "flash_attn_varlen_qkvpacked_func"
    q, k, v = _unpacked(name, "qkv", qkv, 3)
    return _attend(
        name,
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """q [batch, seqlen_q, heads_q, head_dim] over a cache [batch_cache, seqlen_cache, heads_kv,
    head_dim], or with block_table [num_blocks, block_size, heads_kv, head_dim]; k and v, [batch,
    seqlen_new, heads_kv, head_dim], are written into it behind the cache_seqlens rows of each
    sequence, and attended to.

    cache_seqlens: int32 [batch] or one number for all; None, without k: the whole cache.
    rotary_cos, rotary_sin: [max_pos, rotary_dim / 2]; k is rotated at cache_seqlens and on, q too
        where causal or window_size makes its rows differ, else all of q at cache_seqlens.

    For inference: no gradients. Returns o, or with return_softmax_lse (o, softmax_lse).
    """
    name = "flash_attn_with_kvcache"
    if cache_leftpad is not None:
        raise Unsupported(f"{name}: cache_leftpad: got a tensor, wanted None: rows from 0 on")
    if integer(name, "num_splits", num_splits) != 0:
        raise Unsupported(
            f"{name}: num_splits: got {num_splits}, wanted 0: onchip chooses by itself "
            "(onchip.torch.attention_decode has batch_invariant)"
        )
    causal = flag(name, "causal", causal)
    rotary_interleaved = flag(name, "rotary_interleaved", rotary_interleaved)
    if softmax_scale is not None:
        softmax_scale = number(name, "softmax_scale", softmax_scale)
    window_size = _window(name, window_size)
    return_softmax_lse = flag(name, "return_softmax_lse", return_softmax_lse)
    given = dict(q=q, k_cache=k_cache, v_cache=v_cache)
    for argument, tensor in given.items():
        require_tensor(name, argument, tensor)
        if tensor.dim() != 4:
            raise InvalidArgument(
                f"{name}: {argument}: got shape {list(tensor.shape)}, wanted rank 4"
            )
    if block_table is not None:
        require_tensor(name, "block_table", block_table)
        if block_table.dim() != 2:
            raise InvalidArgument(
                f"{name}: block_table: got shape {list(block_table.shape)}, wanted rank 2"
            )
    batch, seqlen_q = q.shape[:2]
    if cache_seqlens is None:
        if k is not None:
            raise InvalidArgument(f"{name}: cache_seqlens: got None with k, wanted the lengths")
        rows = k_cache.shape[1]
        cache_seqlens = rows if block_table is None else rows * block_table.shape[1]
    lengths: Tensor
    if isinstance(cache_seqlens, Tensor):
        lengths = cache_seqlens
    else:
        rows = integer(name, "cache_seqlens", cache_seqlens)
        if not 0 <= rows < 2**31:
            refuse(name, "cache_seqlens", cache_seqlens, "0 or more, in 32 bits")
        lengths = torch.full((batch,), rows, dtype=torch.int32, device=q.device)
    positions = None
    if rotary_cos is not None:
        positions = lengths[:, None].expand(batch, seqlen_q)
        if causal or window_size != (-1, -1):
            steps = torch.arange(seqlen_q, dtype=positions.dtype, device=positions.device)
            positions = positions + steps
    return attention_decode(
        q,
        k_cache,
        v_cache,
        cache_seqlens=lengths,
        k_new=k,
        v_new=v,
        page_table=block_table,
        cache_slot=cache_batch_idx,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved and rotary_cos is not None,
        q_positions=positions,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_lse=return_softmax_lse,
    )
