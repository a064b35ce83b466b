"""Multi-head attention between four projections."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onchip._values import choice, count, flag, number
from onchip.errors import InvalidArgument
from onchip.torch._arguments import require_tensor
from onchip.torch._attention import attention
from onchip.torch._random import draw_dropout_rng
from onchip.torch.nn._arguments import (
    backend_name,
    made_with,
    optional_count,
    optional_number,
    window_of,
)


class Attention(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """Multi-head attention (Vaswani et al. 2017), grouped-query if num_kv_heads < num_heads.

        layer = onchip.torch.nn.Attention(512, 8, num_kv_heads=2, causal=True)
        y = layer(x)                      # self-attention, [batch, seqlen, 512]
        y = layer(x, memory)              # keys and values of another sequence

    Parameters are those of four `torch.nn.Linear` layers: q_proj, k_proj, v_proj and out_proj, with
    their `.weight` and, if bias, `.bias`; out_proj maps num_heads * head_dim back to embed_dim.

    Args:
        embed_dim: channels of x and of the result.
        num_heads: query heads.
        num_kv_heads: heads of keys and values, which num_heads is a multiple of; None: num_heads.
        head_dim: channels of a head; None: embed_dim // num_heads.
        kv_dim: channels of the sequence that keys and values come from; None: embed_dim.
        bias: whether the projections add one.
        causal, alignment, window, softcap, scale: as for `onchip.torch.attention`.
        dropout_p: probability of dropping a weight, in training only (`.train()`, `.eval()`); from
            the default generator of x's device.
        backend: force one by name.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        kv_dim: int | None = None,
        bias: bool = True,
        causal: bool = False,
        alignment: str = "bottom_right",
        window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        scale: float | None = None,
        dropout_p: float = 0.0,
        backend: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = "Attention"
        embed_dim = count(name, "embed_dim", embed_dim)
        num_heads = count(name, "num_heads", num_heads)
        num_kv_heads = optional_count(name, "num_kv_heads", num_kv_heads)
        head_dim = optional_count(name, "head_dim", head_dim)
        kv_dim = optional_count(name, "kv_dim", kv_dim)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        kv_dim = embed_dim if kv_dim is None else kv_dim
        if num_heads % num_kv_heads:
            raise InvalidArgument(
                f"Attention: num_kv_heads: got {num_kv_heads} with num_heads {num_heads}, "
                "wanted a divisor of num_heads"
            )
        if head_dim is None:
            if embed_dim % num_heads:
                raise InvalidArgument(
                    f"Attention: embed_dim: got {embed_dim}, wanted a multiple of num_heads "
                    f"{num_heads}, or head_dim"
                )
            head_dim = embed_dim // num_heads
        dropout_p = number(name, "dropout_p", dropout_p)
        if not 0 <= dropout_p < 1:
            raise InvalidArgument(f"Attention: dropout_p: got {dropout_p}, wanted 0 <= p < 1")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.kv_dim = kv_dim
        self.causal = flag(name, "causal", causal)
        self.alignment = choice(name, "alignment", alignment, ("bottom_right", "top_left"))
        self.window = window_of(name, window)
        self.softcap = number(name, "softcap", softcap)
        self.scale = optional_number(name, "scale", scale)
        self.dropout_p = dropout_p
        self.backend = backend_name(name, backend)
        made = made_with(name, device, dtype) | dict(bias=flag(name, "bias", bias))
        self.q_proj = torch.nn.Linear(embed_dim, num_heads * head_dim, **made)
        self.k_proj = torch.nn.Linear(kv_dim, num_kv_heads * head_dim, **made)
        self.v_proj = torch.nn.Linear(kv_dim, num_kv_heads * head_dim, **made)
        self.out_proj = torch.nn.Linear(num_heads * head_dim, embed_dim, **made)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        cu_seqlens_q: Tensor | Sequence[int] | None = None,
        cu_seqlens_kv: Tensor | Sequence[int] | None = None,
        seqlens_q: Tensor | Sequence[int] | None = None,
        seqlens_kv: Tensor | Sequence[int] | None = None,
    ) -> Tensor:
        """
        Args:
            x: [batch, seqlen_q, embed_dim]; packed (with cu_seqlens_q) [total_q, embed_dim].
            context: what keys and values are made of, [batch, seqlen_kv, kv_dim] or packed
                [total_kv, kv_dim] (with cu_seqlens_kv); None: x.
            mask, bias, cu_seqlens_q, cu_seqlens_kv, seqlens_q, seqlens_kv: as for
                `onchip.torch.attention`.

        Returns:
            x's shape. Rows of a sequence's unused tail attend to nothing: they hold out_proj's
            bias.
        """
        require_tensor("Attention", "x", x)
        context = x if context is None else context
        require_tensor("Attention", "context", context)
        dropout_p = self.dropout_p if self.training else 0.0
        o = attention(
            self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim)),
            self.k_proj(context).unflatten(-1, (self.num_kv_heads, self.head_dim)),
            self.v_proj(context).unflatten(-1, (self.num_kv_heads, self.head_dim)),
            scale=self.scale,
            causal=self.causal,
            alignment=self.alignment,
            window=self.window,
            softcap=self.softcap,
            mask=mask,
            bias=bias,
            dropout_p=dropout_p,
            dropout_rng=draw_dropout_rng(x.device) if dropout_p > 0 else None,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            seqlens_q=seqlens_q,
            seqlens_kv=seqlens_kv,
            backend=self.backend,
        )
        assert isinstance(o, Tensor)
        projected: Tensor = self.out_proj(o.flatten(-2))
        return projected

    def extra_repr(self) -> str:
        parts = [f"num_heads={self.num_heads}", f"num_kv_heads={self.num_kv_heads}"]
        parts.append(f"head_dim={self.head_dim}")
        if self.causal:
            parts.append("causal=True")
        if tuple(self.window) != (-1, -1):
            parts.append(f"window={self.window}")
        if self.dropout_p:
            parts.append(f"dropout_p={self.dropout_p}")
        return ", ".join(parts)
