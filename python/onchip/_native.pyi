"""
onchip's C interface for Python. It knows no attention: arrays in, plan, run, errors out.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

@final
class Tensor:
    """A strided view of an array's memory, kept alive."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def byte_strides(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> tuple[int, int]:
        """(DLPack device type, ordinal): (1, 0) is the CPU, (2, n) a CUDA GPU."""

    @property
    def address(self) -> int: ...
    @property
    def has_data(self) -> bool: ...
    @property
    def layout_problem(self) -> str | None:
        """Why the C library would not take this layout ("innermost stride 64")."""

    def contiguous(self, /) -> Tensor:
        """
        Itself where the layout is fine, else a copy in host memory. Outer axes that repeat
        (stride 0) still do in the copy.
        """

    def copy(self, /) -> Tensor:
        """The same values in host memory of its own."""

def shape(
    op: str, argument: str, shape: Sequence[int], dtype: str, device_type: int, device_id: int, /
) -> Tensor:
    """
    A row-major shape without memory: it can be planned and explained, not run.
    """

@final
class Call:
    """One call of an operator: its argument struct, plan and run."""

    def __init__(self, operator: str, arguments: dict[str, Any], /) -> None:
        """
        `arguments` by the names of the C struct and its options; what is absent, and None
        where it is legal, leaves a default.
        """

    @property
    def workspace_bytes(self) -> int: ...
    @property
    def workspace_alignment(self) -> int: ...
    @property
    def backend(self) -> str | None: ...
    @property
    def kernel(self) -> str | None: ...
    def plan(self, /) -> None:
        """Checks the whole contract and picks a backend."""

    def bind(self, tensors: dict[str, Tensor], /) -> None:
        """Replaces Tensors by others of the same shapes."""

    def run(self, workspace: Tensor | None, stream: int, /) -> None:
        """Computes, without holding the GIL."""

    def explain(self, /) -> str:
        """Which backend takes the call, and why others do not."""

def tensor(
    op: str, argument: str, array: object, dtype: str | None, writable: bool, stream: int, /
) -> Tensor:
    """
    An array's memory, through the first that works of: the DLPack C exchange interface of its
    type, `__dlpack__`, the buffer protocol.

    dtype: read the elements' bytes as this one.
    stream: the CUDA stream that the memory will be used on (0 = the default stream); the
    producer's pending work is ordered before it.
    Raises InvalidArgument, naming op and argument.
    """

@final
class TorchCall:
    """
    An operator's calls with PyTorch's tensors, in few steps: names once, then everything by
    position. Whatever is out of the ordinary is left to others.
    """

    def __init__(
        self,
        operator: str,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        values: tuple[str, ...],
        required: int,
        types: tuple[type, ...],
        /,
    ) -> None:
        """
        Names as in the C struct and its options. The first `required` inputs may not be None.
        types: what tensors have to be, exactly.
        """

    def examine(self, inputs: tuple[object, ...], /) -> bool | None:
        """Whether some tensor requires grad; None if some is not of the types."""

    def run(
        self,
        inputs: tuple[Any, ...],
        outputs: tuple[Any, ...],
        values: tuple[Any, ...],
        allocate: Callable[[int], Any],
        /,
    ) -> bool:
        """
        Plans and computes, on PyTorch's current stream, without holding the GIL. False, and
        nothing is done, where the C library does not take a tensor's memory as it is.

        allocate: makes a workspace of so many bytes, as a tensor of bytes.
        """

def measure_peaks(num_threads: int) -> dict[str, float]:
    """
    What this machine reaches at best on as many threads: multiply-adds per instruction
    set, bf16 dot products, reading and copying memory. Takes seconds and 512 MiB.
    """

def time_reading(memory: object, num_threads: int) -> float:
    """
    Seconds in which as many threads read memory that has Python's buffer protocol and
    lies in one piece, once: what a decoding step is read against.
    """

def described(value: object, /) -> str:
    """
    A value as messages say it: numbers and short text as written, anything else by its type.
    """

def describe() -> str:
    """The library as JSON text."""

def version() -> str:
    """The library's version."""

def set_num_threads(num_threads: int, /) -> None:
    """Threads that CPU backends use at most."""

def get_num_threads() -> int:
    """Threads that CPU backends use at most."""

def kernels_list(filter: str, /) -> str:
    """Registered GPU kernels, as JSON text."""

def kernels_resources(filter: str, /) -> str:
    """What each GPU kernel uses, as JSON text."""

def kernels_warm(filter: str, /) -> None:
    """Compiles GPU kernels into the kernel cache."""

def kernels_build(filter: str, path: str, /) -> None:
    """Writes GPU kernels to an archive."""
