"""The array libraries: how each one's arrays are read, made and ordered on a stream.

No library is imported here: an array in hand means that its library is loaded already.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from onchip import _native
from onchip.errors import InvalidArgument, Unsupported

CPU = 1
CUDA = 2


class ArraySpec(NamedTuple):
    """A shape and dtype without data: stands for an array in `onchip.explain`.

    dtype is a name ("float32", "bfloat16", ...); device is "cpu", "cuda" or "cuda:<ordinal>".
    """

    shape: Sequence[int]
    dtype: str
    device: str = "cpu"


class Kind:
    """One array library. `example` is the call's first array: results are like it."""

    def view(self, op: str, argument: str, array: Any, stream: int) -> _native.Tensor:
        """The array's memory, for reading."""
        return _native.tensor(op, argument, array, None, False, stream)

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
    numpy = sys.modules["numpy"]
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


class _NumPy(Kind):
    def view(self, op: str, argument: str, array: Any, stream: int) -> _native.Tensor:
        numpy = sys.modules["numpy"]
        if type(array) is not numpy.ndarray and isinstance(array, numpy.ma.MaskedArray):
            raise InvalidArgument(
                f"{op}: {argument}: got a MaskedArray, wanted a plain array "
                "(its mask would be ignored)"
            )
        if array.dtype.kind == "V":
            # ml_dtypes: neither DLPack nor the buffer protocol of NumPy carries these.
            name = array.dtype.name
            if name == "bfloat16":
                return _native.tensor(op, argument, array.view("u2"), name, False, stream)
            if name == "float8_e4m3fn":
                return _native.tensor(op, argument, array.view("u1"), "float8_e4m3", False, stream)
        return _native.tensor(op, argument, array, None, False, stream)

    def empty(self, shape: Sequence[int], dtype: str, example: Any) -> Any:
        return sys.modules["numpy"].empty(shape, _numpy_dtype(dtype))

    def memory(self, array: Any) -> Any:
        return array.view("u2") if array.dtype.kind == "V" else array


class _Jax(_NumPy):
    """JAX arrays cannot be written: results are computed in NumPy's memory and handed over."""

    def view(self, op: str, argument: str, array: Any, stream: int) -> _native.Tensor:
        return _native.tensor(op, argument, array, None, False, stream)

    def empty(self, shape: Sequence[int], dtype: str, example: Any) -> Any:
        platform = next(iter(example.devices())).platform
        if platform != "cpu":
            raise Unsupported(
                f"onchip.ops takes JAX arrays on the CPU (got platform {platform!r}): "
                "JAX arrays cannot be written, so results elsewhere would need a copy"
            )
        return super().empty(shape, dtype, example)

    def result(self, array: Any, example: Any) -> Any:
        return sys.modules["jax"].numpy.asarray(array)


class _Torch(Kind):
    def view(self, op: str, argument: str, array: Any, stream: int) -> _native.Tensor:
        if array.requires_grad:
            raise InvalidArgument(
                f"{op}: {argument}: got a tensor that requires grad, wanted a detached one "
                "(onchip.ops has no autograd: call .detach())"
            )
        return _native.tensor(op, argument, array, None, False, stream)

    def stream(self, example: Any) -> int:
        if not example.is_cuda:
            return 0
        return int(sys.modules["torch"].cuda.current_stream(example.device).cuda_stream)

    def empty(self, shape: Sequence[int], dtype: str, example: Any) -> Any:
        torch = sys.modules["torch"]
        name = "float8_e4m3fn" if dtype == "float8_e4m3" else dtype
        return torch.empty(tuple(shape), dtype=getattr(torch, name), device=example.device)

    def contiguous(self, array: Any) -> Any:
        return array.contiguous()


class _CuPy(Kind):
    def stream(self, example: Any) -> int:
        cuda = sys.modules["cupy"].cuda
        with example.device:
            return int(cuda.get_current_stream().ptr)

    def empty(self, shape: Sequence[int], dtype: str, example: Any) -> Any:
        with example.device:
            return sys.modules["cupy"].empty(shape, _numpy_dtype(dtype))

    def contiguous(self, array: Any) -> Any:
        return sys.modules["cupy"].ascontiguousarray(array)


class _ArrayApi(Kind):
    """Any other library that follows the Python array API standard. On a GPU, work goes to the
    default stream: the standard has no way to ask for the current one."""

    def empty(self, shape: Sequence[int], dtype: str, example: Any) -> Any:
        namespace = example.__array_namespace__()
        return namespace.empty(tuple(shape), dtype=getattr(namespace, dtype), device=example.device)


class _Spec(Kind):
    def view(self, op: str, argument: str, array: Any, stream: int) -> _native.Tensor:
        device_type, ordinal = _parse_device(op, argument, array.device)
        return _native.shape(op, argument, tuple(array.shape), array.dtype, device_type, ordinal)


def _parse_device(op: str, argument: str, device: str) -> tuple[int, int]:
    if device == "cpu":
        return CPU, 0
    if device == "cuda":
        return CUDA, 0
    name, _, ordinal = device.partition(":")
    if name == "cuda" and ordinal.isdecimal():
        return CUDA, int(ordinal)
    raise InvalidArgument(
        f'{op}: {argument}: got device {device!r}, wanted "cpu", "cuda" or "cuda:<ordinal>"'
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
