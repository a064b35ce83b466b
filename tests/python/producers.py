"""Arrays of no known library, as DLPack describes them: what a consumer must cope with, and a count
of what it gave back; and how the tests look at what the extension module made of an array."""

import ctypes
from typing import NamedTuple

import numpy as np

from onchip import _native

INT, UINT, FLOAT, BFLOAT, COMPLEX, BOOL = 0, 1, 2, 4, 5, 6
CPU, CUDA, CUDA_HOST, ROCM = 1, 2, 3, 10
READ_ONLY = 1


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _DELETER)]


class _Version(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("version", _Version),
        ("context", ctypes.c_void_p),
        ("deleter", _DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Look(NamedTuple):
    """How an array presents itself."""

    versioned: bool = True
    major: int = 1
    flags: int = 0
    device: tuple[int, int] = (CPU, 0)
    code: int | None = None  # None: the array's own
    lanes: int = 1
    strides: bool = True
    offset: int = 0  # of the first element, by byte_offset


class Exports:
    """Every export that has not been given back keeps its memory here."""

    def __init__(self):
        self.alive = {}
        self.made = 0
        self._delete = _DELETER(self._given_back)

    def _given_back(self, address):
        del self.alive[address]

    def export(self, array, look):
        managed = (_ManagedVersioned if look.versioned else _Managed)()
        tensor = managed.tensor
        shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        strides = (ctypes.c_int64 * array.ndim)(*(s // array.itemsize for s in array.strides))
        tensor.data = array.ctypes.data - look.offset
        tensor.byte_offset = look.offset
        tensor.device.type, tensor.device.id = look.device
        tensor.ndim = array.ndim
        kinds = {"f": FLOAT, "i": INT, "u": UINT, "b": BOOL, "c": COMPLEX}
        tensor.dtype.code = kinds[array.dtype.kind] if look.code is None else look.code
        tensor.dtype.bits = 8 * array.itemsize
        tensor.dtype.lanes = look.lanes
        tensor.shape = shape
        if look.strides:
            tensor.strides = strides
        managed.deleter = self._delete
        if look.versioned:
            managed.version.major = look.major
            managed.flags = look.flags
        address = ctypes.addressof(managed)
        self.alive[address] = (managed, shape, strides, array)
        self.made += 1
        return address


class Producer:
    """An array with __dlpack__ alone."""

    def __init__(self, array, look=None, raises=None):
        self.array = array
        self.look = look or Look()
        self.raises = raises
        self.exports = Exports()
        self.calls = []  # keyword arguments of each __dlpack__

    def __dlpack_device__(self):
        return self.look.device

    def __dlpack__(self, **keywords):
        self.calls.append(keywords)
        if self.raises is not None:
            raise self.raises
        name = b"dltensor_versioned" if self.look.versioned else b"dltensor"
        return _new_capsule(self.exports.export(self.array, self.look), name, None)


class OldProducer(Producer):
    """From before DLPack 1.0: __dlpack__ has no max_version."""

    def __dlpack__(self, stream=None):
        return super().__dlpack__(stream=stream)


_FROM_OBJECT = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))
_CURRENT_STREAM = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)
)


class _Exchange(ctypes.Structure):
    _fields_ = [
        ("version", _Version),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("from_object", _FROM_OBJECT),
        ("to_object", ctypes.c_void_p),
        ("tensor_from_object", ctypes.c_void_p),
        ("current_stream", _CURRENT_STREAM),
    ]


# An exchange table lives as long as the process.
_forever = []


def exchange_producer(major=1, previous_major=None, current_stream=0, fails=False):
    """A new type whose arrays have the C exchange interface besides __dlpack__."""

    class ExchangeProducer(Producer):
        exchanged = 0
        looked_up = 0

    def from_object(producer, out):
        if fails:
            return -1
        ExchangeProducer.exchanged += 1
        out[0] = producer.exports.export(producer.array, producer.look)
        return 0

    def stream(device_type, device_id, out):
        out[0] = current_stream
        return 0

    def table(version):
        made = _Exchange(_Version(version, 3), None, None, _FROM_OBJECT(from_object))
        made.current_stream = _CURRENT_STREAM(stream)
        _forever.append(made)
        return made

    first = table(major)
    if previous_major is not None:
        first.previous = ctypes.addressof(table(previous_major))
    capsule = _new_capsule(ctypes.addressof(first), b"dlpack_exchange_api", None)

    class Lookup:
        def __get__(self, instance, owner):
            ExchangeProducer.looked_up += 1
            return capsule

    ExchangeProducer.__dlpack_c_exchange_api__ = Lookup()
    return ExchangeProducer


class Namespace:
    """The least of the Python array API standard that results need."""

    float64, float32, float16, bool = "float64", "float32", "float16", "bool"

    @staticmethod
    def empty(shape, *, dtype, device):
        assert device == "here"
        return StandardArray(np.empty(shape, dtype))


class StandardArray:
    """An array of a library that follows the Python array API standard, unknown to onchip."""

    device = "here"

    def __init__(self, array):
        self.array = array

    def __array_namespace__(self):
        return Namespace

    def __dlpack_device__(self):
        return (CPU, 0)

    def __dlpack__(self, **keywords):
        return self.array.__dlpack__(**keywords)


# ---- what the extension module sees


def qkv(dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def read(value, *, dtype=None, writable=False, stream=0):
    return _native.tensor("op", "x", value, dtype, writable, stream)


def contents(tensor, dtype):
    """The values that a Tensor of host memory shows."""
    if 0 in tensor.shape:
        return np.empty(tensor.shape, dtype)
    spans = [(n - 1) * s for n, s in zip(tensor.shape, tensor.byte_strides, strict=True)]
    low, high = sum(s for s in spans if s < 0), sum(s for s in spans if s > 0)
    size = np.dtype(dtype).itemsize
    memory = (ctypes.c_char * (high - low + size)).from_address(tensor.address + low)
    return np.ndarray(tensor.shape, dtype, memory, -low, tensor.byte_strides).copy()
