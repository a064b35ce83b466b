"""The functions of the package flash_attn (2.x), for PyTorch tensors.

    from onchip.compat.flash_attn import flash_attn_func

Same layouts, argument orders and alignment (bottom-right: the last query sees the last key).
What differs:
- Tensors may lie on the CPU, be float32 or float64, and have any strides and head dims to 256.
- return_attn_probs gives (o, softmax_lse, None): softmax_lse is differentiable, and -inf for a row
  that sees no key. The probabilities are not computed anywhere; with dropout, where flash_attn
  would return them, the request is refused.
- Dropout draws from PyTorch's default generator, but its mask is onchip's.
- alibi_slopes may have any float dtype. A paged block_table is refused.
- max_seqlen_q and max_seqlen_k are hints: a wrong one changes no result.
"""

from typing import Any, TypeAlias

from torch import Tensor

from onchip.errors import InvalidArgument, Unsupported
from onchip.torch._attention import attention
from onchip.torch._random import draw_dropout_rng

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
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
