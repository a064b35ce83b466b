"""The array libraries: how each one's arrays are read, made and ordered on a stream.

No library is imported here: an array in hand means that its library is loaded already.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from onchip import _native
from onchip._values import described
from onchip.errors import InvalidArgument, Unsupported

CPU = 1
CUDA = 2

_modules: dict[str, Any] = {}


def _module(name: str) -> Any:
    """A library that is loaded. It is kept: sys.modules is empty when the interpreter ends, and
    `__del__` may call an operator then."""
    module = _modules.get(name)
    if module is None:
        module = _modules[name] = sys.modules[name]
    return module


class ArraySpec(NamedTuple):
    """A shape and dtype without data: stands for an array in `onchip.explain`.

    dtype is a name ("float32", "bfloat16", ...); device is "cpu", "cuda" or "cuda:<ordinal>".
    """

    shape: Sequence[int]
    dtype: str
    device: str = "cpu"


class Kind:
    """One array library. `example` is the call's first array: results are like it."""

    # What it uses, loaded where its arrays are.
    modules: tuple[str, ...] = ()

    def view(self, op: str, argument: str, array: Any, stream: int) -> _native.Tensor:
        """The array's memory, for reading."""
        return _native.tensor(op, argument, array, None, False, stream)

    def writable(self, op: str, argument: str, array: Any, stream: int) -> _native.Tensor:
        """The array's memory, for writing in place."""
        return _native.tensor(op, argument, array, None, True, stream)

    def stream(self, example: Any) -> int:
        """The CUDA stream that the caller's work on the example's device goes to."""
        return 0

    def empty(self, shape: Sequence[int], dtype: str, example: Any) -> Any:
        """A new row-major array on the example's device, contents undefined."""
        raise NotImplementedError

    def memory(self, array: Any) -> Any:
        """What to write in order to fill an array from `empty`."""
        return array

    def result(self, array: Any, example: Any) -> Any:
        """The filled array as the caller gets it."""
        return array

    def contiguous(self, array: Any) -> Any:
        """A row-major copy of a GPU array on its own device; itself where the library has no
        way."""
        return array


def _numpy_dtype(name: str) -> Any:
    numpy = _module("numpy")
    if name == "bfloat16":
        # NumPy has none of its own. A caller with bfloat16 arrays has ml_dtypes; one whose bias
        # alone is bfloat16 (a PyTorch tensor beside NumPy arrays) may not.
        try:
            import ml_dtypes
        except ImportError:
            raise Unsupported(
                "a bfloat16 result among NumPy arrays needs the package ml_dtypes"
            ) from None
        return ml_dtypes.bfloat16
    return numpy.dtype(name)


def _view_by_bytes(
    op: str, argument: str, array: Any, stream: int, writable: bool = False
) -> _native.Tensor:
    """Of an array of NumPy's dtypes. Those of ml_dtypes travel as integers of their size: neither
    DLPack nor the buffer protocol of NumPy carries them."""
    if array.dtype.kind == "V":
        name = array.dtype.name
        if name == "bfloat16":
            return _native.tensor(op, argument, array.view("u2"), name, writable, stream)
        if name == "float8_e4m3fn":
            return _native.tensor(op, argument, array.view("u1"), "float8_e4m3", writable, stream)
    return _native.tensor(op, argument, array, None, writable, stream)


class _NumPy(Kind):
    modules: tuple[str, ...] = ("numpy",)

    def view(self, op: str, argument: str, array: Any, stream: int) -> _native.Tensor:
        self._refuse_masked(op, argument, array)
        return _view_by_bytes(op, argument, array, stream)

    def writable(self, op: str, argument: str, array: Any, stream: int) -> _native.Tensor:
        self._refuse_masked(op, argument, array)
        return _view_by_bytes(op, argument, array, stream, True)

    def _refuse_masked(self, op: str, argument: str, array: Any) -> None:
        numpy = _module("numpy")
        if type(array) is not numpy.ndarray and isinstance(array, numpy.ma.MaskedArray):
            raise InvalidArgument(
                f"{op}: {argument}: got a MaskedArray, wanted a plain array "
                "(its mask would be ignored)"
            )

    def empty(self, shape: Sequence[int], dtype: str, example: Any) -> Any:
        return _module("numpy").empty(shape, _numpy_dtype(dtype))

    def memory(self, array: Any) -> Any:
        return array.view("u2") if array.dtype.kind == "V" else array


class _Jax(_NumPy):
    """JAX arrays cannot be written by whoever holds them. On the CPU, results are computed in
    NumPy's memory and handed over. On a GPU they are computed in new arrays that nobody else has
    seen, and imported again: JAX then knows which stream they become ready on, and the call waits
    for that, since JAX may reuse an input's memory as soon as its last holder lets go."""

    modules = ("jax", "numpy")

    def view(self, op: str, argument: str, array: Any, stream: int) -> _native.Tensor:
        return _native.tensor(op, argument, array, None, False, stream)

    def writable(self, op: str, argument: str, array: Any, stream: int) -> _native.Tensor:
        raise InvalidArgument(
            f"{op}: {argument}: got a JAX array, which cannot be written in place, "
            "wanted an array that can (of NumPy, say)"
        )

    def stream(self, example: Any) -> int:
        if isinstance(example, _module("jax").core.Tracer):
            return 0  # refused when it is read
        device = self._device(example)
        if device.platform == "cpu":
            return 0
        # JAX has no current stream; this is the one on which it takes over foreign work.
        return int(device.get_stream_for_external_ready_events())

    def empty(self, shape: Sequence[int], dtype: str, example: Any) -> Any:
        device = self._device(example)
        if device.platform == "cpu":
            return super().empty(shape, dtype, example)
        return _module("jax").numpy.empty(tuple(shape), dtype=dtype, device=device)

    def memory(self, array: Any) -> Any:
        return super().memory(array) if isinstance(array, _module("numpy").ndarray) else array

    def result(self, array: Any, example: Any) -> Any:
        jax = _module("jax")
        if self._device(example).platform == "cpu":
            return jax.numpy.asarray(array)
        return jax.dlpack.from_dlpack(array).block_until_ready()

    def _device(self, array: Any) -> Any:
        devices = list(array.devices())
        if len(devices) != 1 or devices[0].platform not in ("cpu", "gpu"):
            raise Unsupported(
                "onchip.ops takes JAX arrays on one CPU or GPU device, got devices "
                + ", ".join(str(device) for device in devices)
            )
        return devices[0]


class _Torch(Kind):
    modules = ("torch",)

    def view(self, op: str, argument: str, array: Any, stream: int) -> _native.Tensor:
        self._refuse_grad(op, argument, array)
        if array.is_neg():
            array = array.resolve_neg()  # its memory holds the negatives
        return _native.tensor(op, argument, array, None, False, stream)

    def writable(self, op: str, argument: str, array: Any, stream: int) -> _native.Tensor:
        self._refuse_grad(op, argument, array)
        if array.is_neg():
            raise InvalidArgument(
                f"{op}: {argument}: got a lazily negated tensor, wanted one that can be written in "
                "place"
            )
        return _native.tensor(op, argument, array, None, True, stream)

    def _refuse_grad(self, op: str, argument: str, array: Any) -> None:
        if array.requires_grad:
            raise InvalidArgument(
                f"{op}: {argument}: got a tensor that requires grad, wanted a detached one "
                "(onchip.ops has no autograd: call .detach())"
            )

    def stream(self, example: Any) -> int:
        if not example.is_cuda:
            return 0
        return int(_module("torch").cuda.current_stream(example.device).cuda_stream)

    def empty(self, shape: Sequence[int], dtype: str, example: Any) -> Any:
        torch = _module("torch")
        name = "float8_e4m3fn" if dtype == "float8_e4m3" else dtype
        return torch.empty(tuple(shape), dtype=getattr(torch, name), device=example.device)

    def contiguous(self, array: Any) -> Any:
        return array.contiguous()


class _CuPy(Kind):
    modules = ("cupy", "numpy")

    def view(self, op: str, argument: str, array: Any, stream: int) -> _native.Tensor:
        return _view_by_bytes(op, argument, array, stream)

    def writable(self, op: str, argument: str, array: Any, stream: int) -> _native.Tensor:
        return _view_by_bytes(op, argument, array, stream, True)

    def memory(self, array: Any) -> Any:
        return array.view("u2") if array.dtype.kind == "V" else array

    def stream(self, example: Any) -> int:
        cuda = _module("cupy").cuda
        with example.device:
            return int(cuda.get_current_stream().ptr)

    def empty(self, shape: Sequence[int], dtype: str, example: Any) -> Any:
        with example.device:
            return _module("cupy").empty(shape, _numpy_dtype(dtype))

    def contiguous(self, array: Any) -> Any:
        return _module("cupy").ascontiguousarray(array)


class _ArrayApi(Kind):
    """Any other library that follows the Python array API standard. On a GPU, work goes to the
    default stream: the standard has no way to ask for the current one."""

    def empty(self, shape: Sequence[int], dtype: str, example: Any) -> Any:
        namespace = example.__array_namespace__()
        return namespace.empty(tuple(shape), dtype=getattr(namespace, dtype), device=example.device)


class _Spec(Kind):
    def view(self, op: str, argument: str, array: Any, stream: int) -> _native.Tensor:
        device_type, ordinal = _parse_device(op, argument, array.device)
        if not isinstance(array.dtype, str):
            got = described(array.dtype)
            raise InvalidArgument(
                f"{op}: {argument}: got dtype {got}, wanted its name, such as 'float32'"
            )
        try:
            shape = tuple(array.shape)
        except TypeError:
            got = described(array.shape)
            raise InvalidArgument(
                f"{op}: {argument}: got shape {got}, wanted a sequence of integers"
            ) from None
        return _native.shape(op, argument, shape, array.dtype, device_type, ordinal)

    def writable(self, op: str, argument: str, array: Any, stream: int) -> _native.Tensor:
        return self.view(op, argument, array, stream)


def _parse_device(op: str, argument: str, device: object) -> tuple[int, int]:
    if device == "cpu":
        return CPU, 0
    if device == "cuda":
        return CUDA, 0
    if isinstance(device, str):
        name, _, ordinal = device.partition(":")
        # Nine digits fit in the C library's ordinal.
        if name == "cuda" and ordinal.isdecimal() and len(ordinal) < 10:
            return CUDA, int(ordinal)
    got = described(device)
    raise InvalidArgument(
        f'{op}: {argument}: got device {got}, wanted "cpu", "cuda" or "cuda:<ordinal>"'
    )


_GENERIC = Kind()
_ARRAY_API = _ArrayApi()

# (module that is loaded if such arrays exist, its array type, the kind)
_LIBRARIES: list[tuple[str, str, Kind]] = [
    ("numpy", "ndarray", _NumPy()),
    ("torch", "Tensor", _Torch()),
    ("jax", "Array", _Jax()),
    ("cupy", "ndarray", _CuPy()),
]

_known: dict[type, Kind] = {ArraySpec: _Spec()}


def _find(array: object) -> Kind:
    for module_name, array_type, kind in _LIBRARIES:
        module = sys.modules.get(module_name)
        if module is not None and isinstance(array, getattr(module, array_type)):
            return kind
    if hasattr(array, "__array_namespace__") and hasattr(array, "__dlpack__"):
        return _ARRAY_API
    return _GENERIC


def kind_of(array: object) -> Kind:
    """How to read an array of any library; unknown ones are read by DLPack or as a buffer."""
    kind = _known.get(type(array))
    if kind is None:
        kind = _find(array)
        # The array types of libraries are few; other types may be any number and are not kept.
        if kind is not _GENERIC:
            _known[type(array)] = kind
            for name in kind.modules:
                _module(name)
    return kind


def result_kind_of(op: str, argument: str, array: object) -> Kind:
    """The kind that results will have: that of the call's first array."""
    kind = kind_of(array)
    if kind is _GENERIC or isinstance(kind, _Spec):
        raise InvalidArgument(
            f"{op}: {argument}: got {type(array).__name__}, wanted an array whose library onchip "
            "can make results with: NumPy, PyTorch, JAX, CuPy or one with the Python array API"
        )
    return kind
