"""The layer of Mamba-2."""

from typing import Any

import torch
from torch import Tensor

from onchip._linear.calls import limits
from onchip._values import count, number
from onchip.errors import InvalidArgument
from onchip.torch._linear import mamba2, mamba2_step
from onchip.torch.nn._arguments import backend_name, chunk, made_with
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


class Mamba2(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """Mamba-2 (Dao & Gu 2024): one projection, one short convolution, the state space, a gated
    norm, one projection.

        layer = onchip.torch.nn.Mamba2(512)
        y = layer(x)                                   # [batch, T, 512]

    Parameters have their published names: in_proj (z, x, B, C, dt in this order) and out_proj,
    linear without bias; conv1d over x, B and C; A_log, D, dt_bias; norm. They start as published:
    e^A_log uniform in [1, 16), D = 1, softplus(dt_bias) in [1e-3, 0.1] evenly in logarithm, these
    three in float32 and marked `_no_weight_decay`; all others as `torch.nn.Linear` and
    `torch.nn.Conv1d` make them.

    Args:
        embed_dim: channels of x and of the result.
        state_dim: channels of B and C.
        expand: embed_dim to channels inside.
        head_dim: channels of a head; expand * embed_dim is a multiple of it.
        num_groups: heads of B and C; a divisor of the number of heads.
        conv_size: tokens that the convolution sees.
        dt_limit: bounds of the time step.
        norm_eps: of the norm.
        chunk_len, backend: as for `onchip.torch.mamba2`.
    """

    def __init__(
        self,
        embed_dim: int,
        *,
        state_dim: int = 128,
        expand: int = 2,
        head_dim: int = 64,
        num_groups: int = 1,
        conv_size: int = 4,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        norm_eps: float = 1e-5,
        chunk_len: int | None = None,
        backend: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = "Mamba2"
        embed_dim = count(name, "embed_dim", embed_dim)
        state_dim = count(name, "state_dim", state_dim)
        expand = count(name, "expand", expand)
        head_dim = count(name, "head_dim", head_dim)
        num_groups = count(name, "num_groups", num_groups)
        conv_size = count(name, "conv_size", conv_size)
        inner = expand * embed_dim
        if inner % head_dim:
            raise InvalidArgument(
                f"Mamba2: head_dim: got {head_dim}, wanted a divisor of expand * embed_dim = "
                f"{inner}"
            )
        self.num_heads = inner // head_dim
        if self.num_heads % num_groups:
            raise InvalidArgument(
                f"Mamba2: num_groups: got {num_groups}, wanted a divisor of the "
                f"{self.num_heads} heads"
            )
        self.head_dim = head_dim
        self.num_groups = num_groups
        self.state_dim = state_dim
        self.dt_limit = limits(name, dt_limit)
        self.chunk_len = chunk(name, chunk_len)
        self.backend = backend_name(name, backend)
        made = made_with(name, device, dtype)
        shared = num_groups * state_dim
        self._parts = (inner, inner + 2 * shared, self.num_heads)
        self._convolved = (inner, shared, shared)
        self.in_proj = torch.nn.Linear(embed_dim, sum(self._parts), bias=False, **made)
        self.conv1d = ShortConvolution(inner + 2 * shared, conv_size, True, **made)
        wide = wide_dtype(self.in_proj.weight.dtype)
        self.dt_bias = remembers(time_step_bias(self.num_heads, 1e-3, 0.1, device, wide))
        rates = 1 + 15 * torch.rand(self.num_heads, device=device, dtype=wide)
        self.A_log = remembers(rates.log())
        self.D = remembers(torch.ones(self.num_heads, device=device, dtype=wide))
        self.norm = GatedRMSNorm(
            inner,
            eps=number(name, "norm_eps", norm_eps),
            group_size=inner // num_groups,
            gate_first=True,
            **made,
        )
        self.out_proj = torch.nn.Linear(inner, embed_dim, bias=False, **made)

    def new_state(self, num_seqs: int) -> RecurrentState:
        """That of sequences that have not begun."""
        num_seqs = count("Mamba2", "num_seqs", num_seqs, 0)
        weight = self.in_proj.weight
        heads = (num_seqs, self.num_heads, self.head_dim, self.state_dim)
        return RecurrentState(
            weight.new_zeros(heads, dtype=wide_dtype(weight.dtype)),
            (self.conv1d.new_state(num_seqs),),
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
            cu_seqlens, seqlens: as for `onchip.torch.mamba2`.

        Returns:
            x's shape; rows of no sequence, and behind a sequence's used length, are 0.
        """
        rows = Rows("Mamba2", x, state, cu_seqlens, seqlens)
        z, convolved, dt = self.in_proj(rows.cleared(x)).split(self._parts, -1)
        before = None if state is None else state.convolution[0]
        convolved, last = self.conv1d(convolved, rows, before)
        inner, b, c = convolved.split(self._convolved, -1)
        y, recurrent = recur(
            mamba2,
            mamba2_step,
            rows,
            state,
            dict(
                x=inner.unflatten(-1, (self.num_heads, self.head_dim)),
                dt=dt,
                B=b.unflatten(-1, (self.num_groups, self.state_dim)),
                C=c.unflatten(-1, (self.num_groups, self.state_dim)),
            ),
            dict(A=-self.A_log.exp(), D=self.D, dt_bias=self.dt_bias),
            chunk_len=self.chunk_len,
            dt_limit=self.dt_limit,
            backend=self.backend,
        )
        if state is not None:
            state.keep(recurrent, (last,), state.seen + rows.length)
        projected: Tensor = self.out_proj(self.norm(y.flatten(-2), z))
        return projected

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, "
            f"state_dim={self.state_dim}, num_groups={self.num_groups}"
        )
