"""`torch.ops.onchip`: where operators are registered."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("onchip", "DEF")


def define(
    name: str,
    arguments: Iterable[str],
    results: int,
    kernel: Callable[..., Any],
    shapes: Callable[..., Any],
) -> None:
    """An operator with one kernel for CPU and CUDA tensors, and a fake one. arguments: as a schema
    has them, type and name."""
    schema = f"{name}({', '.join(arguments)}) -> ({', '.join(['Tensor'] * results)})"
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, device)
    torch.library.register_fake(f"onchip::{name}", shapes, lib=LIBRARY)


def written(tensors: Iterable[Tensor]) -> None:
    """Tells autograd of memory that the library wrote to behind its back: a graph that keeps one of
    these tensors for its backward pass would be wrong in silence."""
    torch.autograd.graph.increment_version(tuple(tensors))
