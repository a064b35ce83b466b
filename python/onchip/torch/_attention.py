"""The attention function: arguments in order, then the shortest way to the library."""

from collections.abc import Sequence

import torch
from torch import Tensor

from onchip import _calls
from onchip._values import flag
from onchip.torch._arguments import FORWARD, autocast, integers
from onchip.torch._operators import run


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

    Differentiable once, in q, k, v, bias and sink, through o and through lse: the backward pass
    recomputes the scores from o and lse, which it keeps. It raises onchip.Unsupported, with each
    backend's reason, where no backend has one for the call.

    Under autocast, q, k and v are cast to its dtype, float64 excepted, as PyTorch's own attention
    casts them; bias and sink keep theirs.
    """
    window_left, window_right = _calls.window_bounds(FORWARD.name, window)
    return_lse = flag(FORWARD.name, "return_lse", return_lse)
    if torch.are_deterministic_algorithms_enabled():
        deterministic = flag(FORWARD.name, "deterministic", deterministic) or True
    q, k, v = autocast(q, k, v)
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
        None if dropout_rng is None else integers(FORWARD.name, "dropout_rng", dropout_rng),
        None if cu_seqlens_q is None else integers(FORWARD.name, "cu_seqlens_q", cu_seqlens_q),
        None if cu_seqlens_kv is None else integers(FORWARD.name, "cu_seqlens_kv", cu_seqlens_kv),
        None if seqlens_q is None else integers(FORWARD.name, "seqlens_q", seqlens_q),
        None if seqlens_kv is None else integers(FORWARD.name, "seqlens_kv", seqlens_kv),
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
    o, lse = run(tensors, values, return_lse)
    return (o, lse) if return_lse else o
