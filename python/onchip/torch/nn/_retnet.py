"""The layer of RetNet: multi-scale retention."""

from typing import Any

import torch
from torch import Tensor

from onchip._values import count, number
from onchip.errors import InvalidArgument
from onchip.torch._linear import retention, retention_step, rms_norm_gated
from onchip.torch.nn._arguments import backend_name, chunk, made_with
from onchip.torch.nn._recurrent import Lengths, RecurrentState, Rows, recur, wide_dtype


class RetNet(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """Multi-scale retention (Sun et al. 2023): rotated queries and keys, a fixed decay for each
    head, a norm of each head without parameters, a SiLU gate.

        layer = onchip.torch.nn.RetNet(512, num_heads=2)
        y = layer(x)                                   # [batch, T, 512]

    Parameters have their published names: q_proj, k_proj, v_proj, g_proj and out_proj, linear
    without bias. They start as published: Xavier-uniform with gain 2^-2.5, out_proj with 2^-1.

    Args:
        embed_dim: channels of x and of the result; embed_dim / num_heads is even.
        num_heads: heads.
        value_factor: embed_dim to the channels of all heads' values.
        norm_eps: of the norm.
        chunk_len, backend: as for `onchip.torch.retention`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        value_factor: int = 2,
        norm_eps: float = 1e-6,
        chunk_len: int | None = None,
        backend: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = "RetNet"
        embed_dim = count(name, "embed_dim", embed_dim)
        num_heads = count(name, "num_heads", num_heads)
        value_factor = count(name, "value_factor", value_factor)
        if embed_dim % (2 * num_heads):
            raise InvalidArgument(
                f"RetNet: num_heads: got {num_heads} with embed_dim {embed_dim}, wanted heads of "
                "an even number of channels"
            )
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.head_dim_v = value_factor * self.head_dim
        self.norm_eps = number(name, "norm_eps", norm_eps)
        self.chunk_len = chunk(name, chunk_len)
        self.backend = backend_name(name, backend)
        made = made_with(name, device, dtype) | dict(bias=False)
        dim_v = value_factor * embed_dim
        self.q_proj = torch.nn.Linear(embed_dim, embed_dim, **made)
        self.k_proj = torch.nn.Linear(embed_dim, embed_dim, **made)
        self.v_proj = torch.nn.Linear(embed_dim, dim_v, **made)
        self.g_proj = torch.nn.Linear(embed_dim, dim_v, **made)
        self.out_proj = torch.nn.Linear(dim_v, embed_dim, **made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The published first values."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.g_proj):
            torch.nn.init.xavier_uniform_(projection.weight, gain=2**-2.5)
        torch.nn.init.xavier_uniform_(self.out_proj.weight, gain=2**-1)

    def new_state(self, num_seqs: int) -> RecurrentState:
        """That of sequences that have not begun."""
        num_seqs = count("RetNet", "num_seqs", num_seqs, 0)
        weight = self.q_proj.weight
        heads = (num_seqs, self.num_heads, self.head_dim, self.head_dim_v)
        return RecurrentState(
            weight.new_zeros(heads, dtype=wide_dtype(weight.dtype)),
            (),
            weight.new_zeros((num_seqs,), dtype=torch.int64),
        )

    def _rotation(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every pair of channels, [.., 1, head_dim / 2]; angles in float64 or
        float32, since positions grow."""
        wide = wide_dtype(dtype)
        pairs = torch.linspace(0, 1, self.head_dim // 2, device=position.device, dtype=wide)
        angle = position[..., None, None].to(wide) * 10000.0**-pairs
        return angle.cos(), angle.sin()

    def _rotated(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = rotation
        heads = x.unflatten(-1, (self.num_heads, self.head_dim // 2, 2)).to(cos.dtype)
        even, odd = heads.unbind(-1)
        turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
        return turned.flatten(-2).to(x.dtype)

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
            cu_seqlens, seqlens: as for `onchip.torch.retention`.

        Returns:
            x's shape; rows of no sequence, and behind a sequence's used length, are 0.
        """
        rows = Rows("RetNet", x, state, cu_seqlens, seqlens)
        x = rows.cleared(x)
        rotation = self._rotation(rows.absolute_position(state), x.dtype)
        o, recurrent = recur(
            retention,
            retention_step,
            rows,
            state,
            dict(
                q=self._rotated(self.q_proj(x), rotation),
                k=self._rotated(self.k_proj(x), rotation),
                v=self.v_proj(x).unflatten(-1, (self.num_heads, self.head_dim_v)),
            ),
            {},
            chunk_len=self.chunk_len,
            backend=self.backend,
        )
        if state is not None:
            state.keep(recurrent, (), state.seen + rows.length)
        gate = self.g_proj(x).unflatten(-1, (self.num_heads, self.head_dim_v))
        normed = rms_norm_gated(o, gate=gate, activation="silu", eps=self.norm_eps)
        y: Tensor = self.out_proj(normed.flatten(-2))
        return y

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, head_dim_v={self.head_dim_v}"
