"""The arguments of attention as the registered operators have them, tensors, then plain values; and
what is checked of any operator's before the dispatcher sees them."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onchip import _calls
from onchip._linear.calls import limits
from onchip._values import flag, integer, number, refuse, text
from onchip.errors import InvalidArgument, Unsupported

FORWARD = _calls.ATTENTION_FORWARD
BACKWARD = _calls.ATTENTION_BACKWARD

TENSOR_NAMES = (*FORWARD.arrays, *FORWARD.optional_arrays, *FORWARD.integer_arrays)
REQUIRED = len(FORWARD.arrays)
# Name and type in an operator's schema.
VALUES = {
    "scale": "float?",
    "causal": "bool",
    "alignment": "str",
    "window_left": "int",
    "window_right": "int",
    "softcap": "float",
    "dropout_p": "float",
    "max_seqlen_q": "int?",
    "max_seqlen_kv": "int?",
    "precision": "str?",
    "deterministic": "bool",
    "batch_invariant": "bool",
    "check": "bool",
    "backend": "str?",
}
# Those that are one argument of a function.
_PART_OF = {"window_left": "window", "window_right": "window"}
DIFFERENTIABLE = ("q", "k", "v", "bias", "sink")
GRADIENT_INDICES = tuple(TENSOR_NAMES.index(name) for name in DIFFERENTIABLE)
GRADIENTS = tuple("d" + name for name in DIFFERENTIABLE)


_CHECKS: dict[str, Callable[[str, str, Any], Any]] = {
    "bool": flag,
    "int": integer,
    "float": number,
    "str": text,
    "float[]": lambda op, name, value: list(limits(op, value)),
}
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def checked(op: str, kinds: Mapping[str, str], values: Sequence[Any]) -> tuple[Any, ...]:
    """The values for the dispatcher, which has a rule of its own for what is a flag or a number,
    and words of its own for what is not."""
    made = []
    for (name, kind), value in zip(kinds.items(), values, strict=True):
        if isinstance(value, _SYMBOLS) or (value is None and kind.endswith("?")):
            made.append(value)
        else:
            check = _CHECKS[kind.removesuffix("?")]
            made.append(check(op, _PART_OF.get(name, name), value))
    return tuple(made)


def require_tensor(op: str, name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        refuse(op, name, value, "a torch tensor")
    return value


def integers(op: str, name: str, value: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor as it is; a sequence of integers as one in host memory."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, (list, tuple, range)):
        refuse(op, name, value, "a tensor or a sequence of integers")
    try:
        numbers = [x if isinstance(x, int) else operator.index(x) for x in value]
        # Wherever the program's default device is.
        return torch.tensor(numbers, dtype=dtype, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidArgument(
            f"{op}: {name}: got a {type(value).__name__} ({error}), "
            f"wanted integers of {dtype.itemsize * 8} bits or an integer tensor"
        ) from None


def _maybe_autocast() -> bool:
    return True


_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", _maybe_autocast)
_AUTOCAST_FROM = (torch.float32, torch.float16, torch.bfloat16)


def autocast(*operands: Any) -> tuple[Any, ...]:
    """The operands of products, cast where autocast says so on the device of the first."""
    if not _any_autocast():
        return operands
    first = operands[0]
    # Other devices (meta) have no autocast to ask about.
    if not isinstance(first, Tensor) or not (first.is_cuda or first.is_cpu):
        return operands
    device = "cuda" if first.is_cuda else "cpu"
    if not torch.is_autocast_enabled(device):
        return operands
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.dtype in _AUTOCAST_FROM else x for x in operands
    )


def require_tensors(tensors: tuple[Any, ...]) -> None:
    for index, tensor in enumerate(tensors):
        if tensor is None and index >= REQUIRED:
            continue
        require_tensor(FORWARD.name, TENSOR_NAMES[index], tensor)


# ---- where PyTorch's dispatcher can be left out --------------------------------------------------

PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def _no_modes_known() -> int:
    return 1


# How many TorchDispatchModes are on: fake tensors, tracing, selective checkpointing, counters.
_watchers = getattr(torch._C, "_len_torch_dispatch_stack", _no_modes_known)
transforms_active = torch._C._are_functorch_transforms_active
_is_tracing = torch._C._is_tracing


def is_watched(example: Tensor) -> bool:
    """Whether somebody has to see the operator: a compiler, a tracer, a mode, a transform of
    torch.func; or the device has no memory. Elsewhere the dispatcher is left out: on the host it
    takes longer than all the rest of a call."""
    return torch.compiler.is_compiling() or is_watched_eagerly(example)


def is_watched_eagerly(example: Tensor) -> bool:
    """The same, where no compiler is known to be at work."""
    return (
        _watchers() != 0
        or transforms_active()
        or _is_tracing()
        or not (example.is_cuda or example.is_cpu)
    )


def are_plain(tensors: Iterable[Tensor | None]) -> bool:
    return all(tensor is None or type(tensor) in PLAIN_TYPES for tensor in tensors)


NO_FORWARD_MODE = (
    "got a dual tensor, and there is no forward-mode derivative (jvp): use reverse mode"
)


def refuse_tangents(op: str, tensors: Iterable[Tensor | None]) -> None:
    """Forward-mode AD: results without their tangents would be wrong in silence."""
    if forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise Unsupported(f"{op}: {NO_FORWARD_MODE}")
