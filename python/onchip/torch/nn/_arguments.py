"""What layers check of the arguments they are made with: all that their operators would refuse in
the first call only, and what PyTorch would in words of its own."""

from typing import Any

import torch

from onchip import _calls
from onchip._values import count, described, integer, number, refuse, text
from onchip.errors import InvalidArgument


def optional_number(layer: str, name: str, value: Any) -> float | None:
    return None if value is None else number(layer, name, value)


def optional_count(layer: str, name: str, value: Any) -> int | None:
    return None if value is None else count(layer, name, value)


def chunk(layer: str, chunk_len: Any) -> int | None:
    return None if chunk_len is None else integer(layer, "chunk_len", chunk_len)


def backend_name(layer: str, backend: Any) -> str | None:
    return None if backend is None else text(layer, "backend", backend)


def window_of(layer: str, window: Any) -> tuple[int, int]:
    left, right = _calls.window_bounds(layer, window)
    return integer(layer, "window", left), integer(layer, "window", right)


def made_with(layer: str, device: Any, dtype: Any) -> dict[str, Any]:
    """For PyTorch's functions that make parameters."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        got = str(dtype) if isinstance(dtype, torch.dtype) else described(dtype)
        raise InvalidArgument(
            f"{layer}: dtype: got {got}, wanted a floating-point torch.dtype or None"
        )
    if device is not None:
        try:
            torch.device(device)
        except (RuntimeError, TypeError, ValueError):
            refuse(layer, "device", device, "a device of PyTorch's or None")
    return dict(device=device, dtype=dtype)
