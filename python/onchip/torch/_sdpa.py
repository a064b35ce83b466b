"""Attention with the signature and layout of torch.nn.functional."""

import torch
from torch import Tensor

from onchip._values import flag, number
from onchip.errors import InvalidArgument, Unsupported
from onchip.torch._arguments import require_tensor
from onchip.torch._attention import attention
from onchip.torch._random import draw_dropout_rng

_NAME = "scaled_dot_product_attention"


def _check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> None:
    for name, x in (("query", query), ("key", key), ("value", value), ("attn_mask", mask)):
        if x is None and name == "attn_mask":
            continue
        x = require_tensor(_NAME, name, x)
        if x.is_nested:
            raise Unsupported(
                f"{_NAME}: {name}: got a nested tensor, wanted a strided one (sequences of "
                "different lengths: onchip.torch.attention with cu_seqlens_q)"
            )
        if name != "attn_mask" and x.dim() < 2:
            raise InvalidArgument(
                f"{_NAME}: {name}: got shape {list(x.shape)}, wanted [..., seqlen, head_dim]"
            )
    if mask is not None and mask.dim() > max(query.dim(), key.dim(), value.dim()):
        raise InvalidArgument(
            f"{_NAME}: attn_mask: got shape {list(mask.shape)}, wanted one that broadcasts to "
            "[..., seqlen_q, seqlen_kv] of the inputs' rank"
        )
    if mask is not None and causal:
        raise InvalidArgument(
            f"{_NAME}: is_causal: got True beside attn_mask, wanted one of them, as in torch "
            "(onchip.torch.attention takes both)"
        )


def _heads_apart(x: Tensor) -> Tensor:
    """At least rank 4; of a lower one, the axis before seqlen counts as heads."""
    return x[(None,) * (4 - x.dim())] if x.dim() < 4 else x


def _broadcast(shapes: list[torch.Size], names: str) -> torch.Size:
    if all(shape == shapes[0] for shape in shapes):
        return shapes[0]
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        got = ", ".join(str(list(shape)) for shape in shapes)
        raise InvalidArgument(
            f"{_NAME}: {names}: got leading axes {got}, wanted ones that broadcast"
        ) from None


def _rows(x: Tensor, leading: torch.Size) -> Tensor:
    """[*leading, heads, seqlen, dim], broadcast, as [batch, seqlen, heads, dim]."""
    if x.shape[:-3] != leading:
        x = x.expand(*leading, *x.shape[-3:])
    if len(leading) > 1:
        x = x.flatten(0, -4)
    return x.transpose(1, 2)


def _pairs(mask: Tensor, leading: torch.Size) -> Tensor:
    """[batch|1, heads|1, seqlen_q|1, seqlen_kv|1]"""
    mask = _heads_apart(mask)
    if len(leading) < 2:
        return mask
    # Axes that all repeat stay one axis that does.
    if any(n != 1 for n in mask.shape[:-3]):
        mask = mask.expand(*leading, *mask.shape[-3:])
    return mask.flatten(0, -4)


def _equal_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads broadcast as torch's leading axes do. One head of keys beside many of queries is left
    as it is: that is grouped-query attention with one group."""
    heads = _broadcast([q.shape[-3:-2], k.shape[-3:-2], v.shape[-3:-2]], "query, key, value")
    if q.shape[-3:-2] == heads and k.shape[-3] == v.shape[-3]:
        return q, k, v
    q, k, v = (x.expand(*x.shape[:-3], *heads, *x.shape[-2:]) for x in (q, k, v))
    return q, k, v


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, computed by onchip.

    Inputs are read through strided views, not copied; only leading axes that cannot be seen as one
    (more than one beside heads, in an order of their own, or partly broadcast) are.

    Args:
        query: [..., heads, seqlen_q, head_dim], any number of leading axes, or none.
        key, value: [..., heads, seqlen_kv, head_dim] and [..., heads, seqlen_kv, head_dim_v];
            leading axes broadcast.
        attn_mask: broadcasts to [..., heads, seqlen_q, seqlen_kv]. bool: True takes part. Float, of
            any float dtype: added to the scores, and differentiable.
        dropout_p: probability of dropping a weight; applied whenever it is above 0. The mask comes
            from the default generator of query's device (torch.manual_seed).
        is_causal: query i sees keys j <= i, also where the lengths differ (top-left).
        scale: None is head_dim ** -0.5.
        enable_gqa: query heads may be a multiple of the heads of key and value; consecutive ones
            share.

    Returns:
        [..., heads, seqlen_q, head_dim_v], query's dtype (autocast's under autocast). A query that
        sees no key gets 0. In memory, heads lie inside seqlen.

    Differentiable as `onchip.torch.attention` is.
    """
    is_causal = flag(_NAME, "is_causal", is_causal)
    enable_gqa = flag(_NAME, "enable_gqa", enable_gqa)
    dropout_p = number(_NAME, "dropout_p", dropout_p)
    scale = None if scale is None else number(_NAME, "scale", scale)
    _check(query, key, value, attn_mask, is_causal)
    rank = max(query.dim(), key.dim(), value.dim())
    q, k, v = _heads_apart(query), _heads_apart(key), _heads_apart(value)
    if not enable_gqa:
        q, k, v = _equal_heads(q, k, v)
    shapes = [q.shape[:-3], k.shape[:-3], v.shape[:-3]]
    if attn_mask is not None and attn_mask.dim() > 3:
        shapes.append(attn_mask.shape[:-3])
    leading = _broadcast(shapes, "query, key, value, attn_mask")
    bias = mask = None
    if attn_mask is not None:
        pairs = _pairs(attn_mask, leading)
        if pairs.dtype == torch.bool:
            mask = pairs
        else:
            bias = pairs
    o = attention(
        _rows(q, leading),
        _rows(k, leading),
        _rows(v, leading),
        scale=scale,
        causal=is_causal,
        alignment="top_left",
        mask=mask,
        bias=bias,
        dropout_p=dropout_p,
        dropout_rng=draw_dropout_rng(query.device) if dropout_p > 0 else None,
    )
    assert isinstance(o, Tensor)
    o = o.transpose(1, 2)
    if len(leading) > 1:
        o = o.unflatten(0, leading)
    return o[(0,) * (4 - rank)] if rank < 4 else o
