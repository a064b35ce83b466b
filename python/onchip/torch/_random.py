"""Dropout's random state, drawn from PyTorch's generators."""

import torch
from torch import Tensor


def draw_dropout_rng(device: torch.device) -> Tensor:
    """A fresh (seed, offset) for `dropout_rng`, on the device: the next numbers of its default
    generator.

    `torch.manual_seed` makes it repeatable, `torch.utils.checkpoint` restores it, nothing waits for
    a GPU, and every replay of a CUDA graph draws anew. Two draws give unrelated masks: seed and
    offset are 32 random bits each, 64 in all.
    """
    return torch.randint(1 << 32, (2,), dtype=torch.int64, device=device)
