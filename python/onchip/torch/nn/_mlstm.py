"""The mLSTM layer of xLSTM-7B."""

import math
from typing import Any

import torch
from torch import Tensor

from onchip._values import count, flag, number
from onchip.errors import InvalidArgument
from onchip.torch._linear import mlstm, mlstm_step
from onchip.torch.nn._arguments import backend_name, chunk, made_with
from onchip.torch.nn._norms import HeadNorm
from onchip.torch.nn._recurrent import Lengths, RecurrentState, Rows, recur, wide_dtype


def _channels(name: str, factor: Any, embed_dim: int, num_heads: int) -> int:
    channels = number("MLSTM", name, factor) * embed_dim
    if not 1 <= channels < 2**63 or int(channels) % num_heads:
        raise InvalidArgument(
            f"MLSTM: {name}: got {factor}, {channels:.0f} channels with {num_heads} heads, wanted "
            "a multiple"
        )
    return int(channels)


class MLSTM(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """The mLSTM with its projections, as in xLSTM-7B (Beck et al. 2025): the exponential gate's
    cell on soft-capped gates, a norm of each head, an output gate.

        layer = onchip.torch.nn.MLSTM(512, num_heads=4)
        y = layer(x)                                   # [batch, T, 512]

    Parameters have their published names: q, k, v, ogate_preact and out_proj; igate_preact and
    fgate_preact, which have a bias; multihead_norm. They start as published: normal of standard
    deviation sqrt(2 / (5 embed_dim)), that of out_proj 2 / (num_blocks sqrt(embed_dim)); the gates
    from weights of 0 with input biases of -10 and forget biases evenly from 3 to 6 over the heads.

    Args:
        embed_dim: channels of x and of the result.
        num_heads: heads.
        qk_dim_factor, v_dim_factor: embed_dim to the channels of all heads' queries and keys, and
            of their values.
        gate_soft_cap: c of c tanh(x / c), before the gates.
        num_blocks: blocks of the model, for out_proj's first values.
        bias: whether projections and norm have one.
        eps: of the cell's denominator.
        norm_eps: of the norm.
        chunk_len, backend: as for `onchip.torch.mlstm`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        qk_dim_factor: float = 0.5,
        v_dim_factor: float = 1.0,
        gate_soft_cap: float = 15.0,
        num_blocks: int = 1,
        bias: bool = False,
        eps: float = 1e-6,
        norm_eps: float = 1e-6,
        chunk_len: int | None = None,
        backend: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = "MLSTM"
        embed_dim = count(name, "embed_dim", embed_dim)
        num_heads = count(name, "num_heads", num_heads)
        dim_qk = _channels("qk_dim_factor", qk_dim_factor, embed_dim, num_heads)
        dim_v = _channels("v_dim_factor", v_dim_factor, embed_dim, num_heads)
        bias = flag(name, "bias", bias)
        self.num_heads = num_heads
        self.head_dim = dim_qk // num_heads
        self.head_dim_v = dim_v // num_heads
        self.gate_soft_cap = number(name, "gate_soft_cap", gate_soft_cap)
        self.num_blocks = count(name, "num_blocks", num_blocks)
        self.eps = number(name, "eps", eps)
        self.chunk_len = chunk(name, chunk_len)
        self.backend = backend_name(name, backend)
        made = made_with(name, device, dtype)
        norm_eps = number(name, "norm_eps", norm_eps)
        self.q = torch.nn.Linear(embed_dim, dim_qk, bias=bias, **made)
        self.k = torch.nn.Linear(embed_dim, dim_qk, bias=bias, **made)
        self.v = torch.nn.Linear(embed_dim, dim_v, bias=bias, **made)
        self.ogate_preact = torch.nn.Linear(embed_dim, dim_v, bias=bias, **made)
        self.igate_preact = torch.nn.Linear(embed_dim, num_heads, **made)
        self.fgate_preact = torch.nn.Linear(embed_dim, num_heads, **made)
        self.multihead_norm = HeadNorm(num_heads, self.head_dim_v, eps=norm_eps, bias=bias, **made)
        self.out_proj = torch.nn.Linear(dim_v, embed_dim, bias=bias, **made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The published first values, of projections and gates."""
        dim = self.q.weight.shape[1]
        small, last = math.sqrt(2 / (5 * dim)), 2 / (self.num_blocks * math.sqrt(dim))
        for projection, deviation in (
            (self.q, small),
            (self.k, small),
            (self.v, small),
            (self.ogate_preact, small),
            (self.out_proj, last),
        ):
            torch.nn.init.normal_(projection.weight, std=deviation)
            if projection.bias is not None:
                torch.nn.init.zeros_(projection.bias)
        for gate in (self.igate_preact, self.fgate_preact):
            torch.nn.init.zeros_(gate.weight)
        torch.nn.init.constant_(self.igate_preact.bias, -10.0)
        with torch.no_grad():
            self.fgate_preact.bias.copy_(torch.linspace(3.0, 6.0, self.num_heads))

    def new_state(self, num_seqs: int) -> RecurrentState:
        """That of sequences that have not begun."""
        num_seqs = count("MLSTM", "num_seqs", num_seqs, 0)
        weight = self.q.weight
        wide = wide_dtype(weight.dtype)
        keys = (num_seqs, self.num_heads, self.head_dim)
        return RecurrentState(
            (
                weight.new_zeros((*keys, self.head_dim_v), dtype=wide),
                weight.new_zeros(keys, dtype=wide),
                weight.new_zeros(keys[:2], dtype=wide),
            ),
            (),
            weight.new_zeros((num_seqs,), dtype=torch.int64),
        )

    def _capped(self, x: Tensor) -> Tensor:
        return self.gate_soft_cap * torch.tanh(x / self.gate_soft_cap)

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
            cu_seqlens, seqlens: as for `onchip.torch.mlstm`.

        Returns:
            x's shape; rows of no sequence, and behind a sequence's used length, are what a layer
            without input gives: 0 without biases.
        """
        rows = Rows("MLSTM", x, state, cu_seqlens, seqlens)
        x = rows.cleared(x)
        h, recurrent = recur(
            mlstm,
            mlstm_step,
            rows,
            state,
            dict(
                q=self.q(x).unflatten(-1, (self.num_heads, self.head_dim)),
                k=self.k(x).unflatten(-1, (self.num_heads, self.head_dim)),
                v=self.v(x).unflatten(-1, (self.num_heads, self.head_dim_v)),
                i=self._capped(self.igate_preact(x)),
                f=self._capped(self.fgate_preact(x)),
            ),
            {},
            chunk_len=self.chunk_len,
            eps=self.eps,
            backend=self.backend,
        )
        if state is not None:
            state.keep(recurrent, (), state.seen + rows.length)
        gated = torch.sigmoid(self.ogate_preact(x)) * self.multihead_norm(h)
        y: Tensor = self.out_proj(gated)
        return y

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, head_dim_v={self.head_dim_v}"
