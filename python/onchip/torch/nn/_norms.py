"""Norms behind a recurrence, in float32."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from onchip._values import count, flag, number
from onchip.torch._arguments import require_tensor
from onchip.torch._linear import rms_norm_gated
from onchip.torch.nn._arguments import made_with, optional_count
from onchip.torch.nn._recurrent import wide_dtype


class GatedRMSNorm(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """x / RMS(x) times weight times silu(gate); with gate_first RMS and all of x silu(gate).

    Args:
        dim: channels, the last axis.
        eps: added to the mean square.
        group_size: channels that are normalised together, a divisor of dim; None: dim.
        gate_first: whether the gate comes before the norm, as in Mamba-2.
    """

    def __init__(
        self,
        dim: int,
        *,
        eps: float = 1e-5,
        group_size: int | None = None,
        gate_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = "GatedRMSNorm"
        dim = count(name, "dim", dim)
        self.eps = number(name, "eps", eps)
        group_size = optional_count(name, "group_size", group_size)
        self.group_size = dim if group_size is None else group_size
        self.gate_first = flag(name, "gate_first", gate_first)
        self.weight = torch.nn.Parameter(torch.ones(dim, **made_with(name, device, dtype)))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        require_tensor("GatedRMSNorm", "gate", gate)
        y: Tensor = rms_norm_gated(
            x,
            gate=gate,
            weight=self.weight,
            activation="silu",
            gate_first=self.gate_first,
            group_size=self.group_size,
            eps=self.eps,
        )
        return y


class HeadNorm(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """LayerNorm of each head by itself, with a weight for every channel of every head."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        eps: float,
        bias: bool,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        made: dict[str, Any] = dict(device=device, dtype=dtype)
        self.weight = torch.nn.Parameter(torch.ones(num_heads * head_dim, **made))
        self.bias = torch.nn.Parameter(torch.zeros(num_heads * head_dim, **made)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[.., num_heads, head_dim] to [.., num_heads * head_dim]."""
        wide = wide_dtype(x.dtype)
        y = functional.layer_norm(x.to(wide), x.shape[-1:], eps=self.eps).flatten(-2)
        y = y * self.weight.to(wide)
        return (y if self.bias is None else y + self.bias.to(wide)).to(x.dtype)
