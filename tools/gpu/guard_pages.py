"""Torch tensors that begin or end where nothing is mapped: an access past that edge is a fault of
the device, where memory of the allocator would let it pass."""

import ctypes
import functools
import math
import subprocess
import sys

import driver
import nvrtc
import torch

_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


_DEVICE = _Location(_ON_DEVICE, 0)
_PROPERTIES = _Properties(type=_PINNED, location=_DEVICE)


@functools.cache
def _granularity():
    size = ctypes.c_size_t()
    status = driver.library().cuMemGetAllocationGranularity(
        ctypes.byref(size), ctypes.byref(_PROPERTIES), 0
    )
    driver.check(status, "cuMemGetAllocationGranularity")
    return size.value


class Mapping:
    """Mapped memory between two stretches, each as long, of addresses that are reserved and
    nothing else. Needs torch's context."""

    def __init__(self, nbytes):
        lib = driver.library()
        self.size = -(-nbytes // _granularity()) * _granularity()
        self._reserved, self._handle = ctypes.c_uint64(), ctypes.c_uint64()
        size = ctypes.c_size_t(self.size)
        driver.check(
            lib.cuMemAddressReserve(
                *(ctypes.byref(self._reserved), ctypes.c_size_t(3 * self.size)),
                *(ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0)),
            ),
            "cuMemAddressReserve",
        )
        self.begin = self._reserved.value + self.size
        driver.check(
            lib.cuMemCreate(
                ctypes.byref(self._handle), size, ctypes.byref(_PROPERTIES), ctypes.c_uint64(0)
            ),
            "cuMemCreate",
        )
        driver.check(
            lib.cuMemMap(
                *(ctypes.c_uint64(self.begin), size, ctypes.c_size_t(0)),
                *(self._handle, ctypes.c_uint64(0)),
            ),
            "cuMemMap",
        )
        access = _Access(_DEVICE, _READ_WRITE)
        driver.check(
            lib.cuMemSetAccess(
                ctypes.c_uint64(self.begin), size, ctypes.byref(access), ctypes.c_size_t(1)
            ),
            "cuMemSetAccess",
        )

    def __del__(self):
        lib = driver.library()
        torch.cuda.synchronize()
        lib.cuMemUnmap(ctypes.c_uint64(self.begin), ctypes.c_size_t(self.size))
        lib.cuMemRelease(self._handle)
        lib.cuMemAddressFree(self._reserved, ctypes.c_size_t(3 * self.size))


class _Array:
    """16-bit values in a mapping, as torch takes arrays of others."""

    def __init__(self, mapping, address, shape):
        self._mapping = mapping
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<i2",
            "data": (address, False),
            "version": 3,
        }


def tensor(shape, dtype, value, at_end):
    """Contiguous, of 16-bit values: its last byte, or its first, is the mapping's."""
    nbytes = 2 * math.prod(shape)
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cuda")
    mapping = Mapping(nbytes)
    address = mapping.begin + (mapping.size - nbytes if at_end else 0)
    made = torch.as_tensor(_Array(mapping, address, tuple(shape)), device="cuda").view(dtype)
    return made.fill_(value)


# ---- do the guards hold?

_TOUCH = 'extern "C" __global__ void touch(volatile int* at) { *at = *at + 1; }'


_PLACES = ("first", "last", "before", "behind")


def _touch(place):
    """Reads and writes 4 bytes at the edge of a mapping."""
    torch.zeros(1, device="cuda")
    mapping = Mapping(1)
    image, log = nvrtc.compile_text(_TOUCH, "touch.cu")
    assert image is not None, log
    offset = {"first": 0, "last": mapping.size - 4, "before": -4, "behind": mapping.size}[place]
    driver.Kernel(image, "touch").launch(
        1,
        1,
        [ctypes.c_uint64(mapping.begin + offset)],
        torch.cuda.current_stream().cuda_stream,
    )
    torch.cuda.synchronize()


def probe():
    """Why the guards do not hold, "" if they do. A child each: a fault ends its process's use of
    the device."""
    for place in _PLACES:
        child = subprocess.run([sys.executable, __file__, place], capture_output=True, text=True)
        passes = place in ("first", "last")
        if (child.returncode == 0) != passes or (not passes and "illegal" not in child.stderr):
            return f"{place}: exit {child.returncode}: {child.stderr[-500:]}"
    return ""


if __name__ == "__main__":
    _touch(sys.argv[1])
