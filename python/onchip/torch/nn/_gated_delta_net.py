"""The layer of Gated DeltaNet."""

from typing import Any

import torch
from torch import Tensor

from onchip._values import count, flag, number
from onchip.errors import InvalidArgument
from onchip.torch._linear import gated_delta_rule, gated_delta_rule_step
from onchip.torch.nn._arguments import backend_name, chunk, made_with, optional_count
from onchip.torch.nn._norms import GatedRMSNorm
from onchip.torch.nn._recurrent import (
    Lengths,
    RecurrentState,
    Rows,
    ShortConvolution,
    recur,
    remembers,
    time_step_bias,
    wide_dtype,
)


class GatedDeltaNet(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """Gated DeltaNet (Yang et al. 2025): short convolutions, the gated delta rule on normalised
    queries and keys, a gated norm for each head, between projections.

        layer = onchip.torch.nn.GatedDeltaNet(512, num_heads=4, head_dim=96)
        y = layer(x)                                   # [batch, T, 512]
        state = layer.new_state(batch)
        with torch.no_grad():
            y = layer(prompt, state=state)             # then a token at a time
            y = layer(token, state=state)              # [batch, 1, 512]

    Parameters have their published names: q_proj, k_proj, v_proj, a_proj (decay), b_proj (beta),
    g_proj (gate) and o_proj, linear without bias; q_conv1d, k_conv1d, v_conv1d; A_log, dt_bias;
    o_norm. They start as published: e^A_log uniform in (0, 16], softplus(dt_bias) in [1e-3, 0.1]
    evenly in logarithm, both in float32 and marked `_no_weight_decay`; all others as
    `torch.nn.Linear` and `torch.nn.Conv1d` make them.

    Args:
        embed_dim: channels of x and of the result.
        num_heads: heads of queries and keys.
        head_dim: channels of a query and key head.
        num_heads_v: heads of values, a multiple of num_heads; None: num_heads.
        head_dim_v: channels of a value head; None: 2 head_dim.
        conv_size: tokens that the convolutions see.
        conv_bias: whether they add one.
        allow_neg_eigval: beta in (0, 2) in place of (0, 1).
        norm_eps: of the norm.
        chunk_len, backend: as for `onchip.torch.gated_delta_rule`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        head_dim: int,
        *,
        num_heads_v: int | None = None,
        head_dim_v: int | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-5,
        chunk_len: int | None = None,
        backend: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = "GatedDeltaNet"
        embed_dim = count(name, "embed_dim", embed_dim)
        num_heads = count(name, "num_heads", num_heads)
        head_dim = count(name, "head_dim", head_dim)
        num_heads_v = optional_count(name, "num_heads_v", num_heads_v)
        head_dim_v = optional_count(name, "head_dim_v", head_dim_v)
        conv_size = count(name, "conv_size", conv_size)
        conv_bias = flag(name, "conv_bias", conv_bias)
        num_heads_v = num_heads if num_heads_v is None else num_heads_v
        if num_heads_v % num_heads:
            raise InvalidArgument(
                f"GatedDeltaNet: num_heads_v: got {num_heads_v} with num_heads {num_heads}, "
                "wanted a multiple of num_heads"
            )
        self.num_heads = num_heads
        self.num_heads_v = num_heads_v
        self.head_dim = head_dim
        self.head_dim_v = 2 * head_dim if head_dim_v is None else head_dim_v
        self.allow_neg_eigval = flag(name, "allow_neg_eigval", allow_neg_eigval)
        self.chunk_len = chunk(name, chunk_len)
        self.backend = backend_name(name, backend)
        made = made_with(name, device, dtype)
        dim_k, dim_v = num_heads * head_dim, num_heads_v * self.head_dim_v

        def linear(inputs: int, outputs: int) -> torch.nn.Linear:
            return torch.nn.Linear(inputs, outputs, bias=False, **made)

        self.q_proj = linear(embed_dim, dim_k)
        self.k_proj = linear(embed_dim, dim_k)
        self.v_proj = linear(embed_dim, dim_v)
        self.a_proj = linear(embed_dim, num_heads_v)
        self.b_proj = linear(embed_dim, num_heads_v)
        self.q_conv1d = ShortConvolution(dim_k, conv_size, conv_bias, **made)
        self.k_conv1d = ShortConvolution(dim_k, conv_size, conv_bias, **made)
        self.v_conv1d = ShortConvolution(dim_v, conv_size, conv_bias, **made)
        wide = wide_dtype(self.q_proj.weight.dtype)
        # (0, 16]: the logarithm of 0 would keep a head from ever decaying.
        rates = 16 * (1 - torch.rand(num_heads_v, device=device, dtype=wide))
        self.A_log = remembers(rates.log())
        self.dt_bias = remembers(time_step_bias(num_heads_v, 1e-3, 0.1, device, wide))
        self.g_proj = linear(embed_dim, dim_v)
        self.o_norm = GatedRMSNorm(self.head_dim_v, eps=number(name, "norm_eps", norm_eps), **made)
        self.o_proj = linear(dim_v, embed_dim)

    def new_state(self, num_seqs: int) -> RecurrentState:
        """That of sequences that have not begun."""
        num_seqs = count("GatedDeltaNet", "num_seqs", num_seqs, 0)
        weight = self.q_proj.weight
        heads = (num_seqs, self.num_heads_v, self.head_dim, self.head_dim_v)
        return RecurrentState(
            weight.new_zeros(heads, dtype=wide_dtype(weight.dtype)),
            tuple(x.new_state(num_seqs) for x in (self.q_conv1d, self.k_conv1d, self.v_conv1d)),
            weight.new_zeros((num_seqs,), dtype=torch.int64),
        )

    def forward(
        self,
        x: Tensor,
        *,
        state: RecurrentState | None = None,
        cu_seqlens: Lengths | None = None,
        seqlens: Lengths | None = None,
    ) -> Tensor:
        """
        Args:
            x: [batch, T, embed_dim]; packed (with cu_seqlens) [total, embed_dim].
            state: where the sequences stand; the layer leaves there where they stand afterwards.
            cu_seqlens, seqlens: as for `onchip.torch.gated_delta_rule`.

        Returns:
            x's shape; rows of no sequence, and behind a sequence's used length, are 0.
        """
        rows = Rows("GatedDeltaNet", x, state, cu_seqlens, seqlens)
        x = rows.cleared(x)
        before = (None,) * 3 if state is None else state.convolution
        q, q_last = self.q_conv1d(self.q_proj(x), rows, before[0])
        k, k_last = self.k_conv1d(self.k_proj(x), rows, before[1])
        v, v_last = self.v_conv1d(self.v_proj(x), rows, before[2])
        o, recurrent = recur(
            gated_delta_rule,
            gated_delta_rule_step,
            rows,
            state,
            dict(
                q=q.unflatten(-1, (self.num_heads, self.head_dim)),
                k=k.unflatten(-1, (self.num_heads, self.head_dim)),
                v=v.unflatten(-1, (self.num_heads_v, self.head_dim_v)),
                log_decay=self.a_proj(x),
                beta=self.b_proj(x),
            ),
            dict(A_log=self.A_log, dt_bias=self.dt_bias),
            chunk_len=self.chunk_len,
            qk_l2norm=True,
            allow_neg_eigval=self.allow_neg_eigval,
            backend=self.backend,
        )
        if state is not None:
            state.keep(recurrent, (q_last, k_last, v_last), state.seen + rows.length)
        gate = self.g_proj(x).unflatten(-1, (self.num_heads_v, self.head_dim_v))
        y: Tensor = self.o_proj(self.o_norm(o, gate).flatten(-2))
        return y

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, "
            f"num_heads_v={self.num_heads_v}, head_dim_v={self.head_dim_v}"
        )
