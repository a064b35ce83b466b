"""A case made ready to be called, and what every implementation needs for that."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from onchip.bench.inputs import Array


class Skipped(Exception):
    """The measurement cannot be made here; the text says why."""


@dataclass(frozen=True)
class Prepared:
    call: Callable[[], Any]
    # The call's results by name, o, dq, dk, dv, as `[batch, seqlen, heads, head_dim]`.
    outputs: Callable[[Any], dict[str, Array]]
    # What the caller gets and would have to hold anyway.
    result_bytes: int
    backend: str
    kernel: str
    # Waits until everything that was called is done.
    finish: Callable[[], None] = lambda: None
    # In this process's own memory, where its peak can be seen.
    in_host_memory: bool = True


def chosen(explanation: str) -> tuple[str, str]:
    """Backend and kernel from the text of onchip.explain."""
    line = re.search(r"^  (\S+): chosen: (.+), workspace \d+ bytes$", explanation, re.MULTILINE)
    if line is None:
        raise ValueError(f"no backend is chosen in {explanation!r}")
    return line[1], line[2]


def planned(operator: str, *arrays: Any, **options: Any) -> tuple[str, str]:
    """Backend and kernel of the call; Skipped, with the reason, where it is refused."""
    import onchip

    backend = options["backend"]
    text = onchip.explain(operator, *arrays, **options)
    refusal = re.search(rf"^  {re.escape(backend)}: (?!chosen)\S+: (.+)$", text, re.MULTILINE)
    if refusal is not None:
        raise Skipped(refusal[1])
    return chosen(text)


def to_torch(array: Array, device: str) -> Any:
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def from_torch(tensor: Any) -> Array:
    """In fp32 where NumPy has not the tensor's dtype."""
    import torch

    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def sync_cuda() -> None:
    import torch

    torch.cuda.synchronize()
