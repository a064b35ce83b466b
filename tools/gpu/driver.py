"""The CUDA driver API through ctypes, as far as launching a cubin with tensor maps needs it. The
current context is the caller's: torch's, or what use_device made."""

import ctypes
import functools

_SHARED_BYTES_ATTRIBUTE = 8
DTYPE_FLOAT16, DTYPE_BFLOAT16 = 6, 9
SWIZZLE_NONE, SWIZZLE_128B = 0, 3
_PROMOTION_256B = 3


@functools.cache
def library():
    return ctypes.CDLL("libcuda.so.1")


def check(status, what):
    if status != 0:
        text = ctypes.c_char_p()
        library().cuGetErrorName(status, ctypes.byref(text))
        raise RuntimeError(f"{what}: {text.value.decode() if text.value else status}")


class NoDevice(Exception):
    """No driver or no GPU of the wanted compute capability."""


@functools.cache
def use_device(capability):
    """Makes device 0's primary context current, if the device is of that compute capability."""
    try:
        lib = library()
    except OSError as error:
        raise NoDevice(str(error)) from None
    if lib.cuInit(0) != 0:
        raise NoDevice("cuInit fails: no usable GPU")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    check(lib.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    got = []
    for attribute in (75, 76):  # compute capability, major and minor
        value = ctypes.c_int()
        check(lib.cuDeviceGetAttribute(ctypes.byref(value), attribute, device), "attribute")
        got.append(value.value)
    if tuple(got) != capability:
        raise NoDevice(f"device 0 has compute capability {got[0]}.{got[1]}")
    check(lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    check(lib.cuCtxSetCurrent(context), "cuCtxSetCurrent")


class Buffer:
    """Device memory with the bytes of a NumPy array; read() gives an array of its kind."""

    def __init__(self, array):
        self._like = array
        self._pointer = ctypes.c_uint64()
        lib = library()
        check(
            lib.cuMemAlloc_v2(ctypes.byref(self._pointer), ctypes.c_size_t(max(array.nbytes, 16))),
            "cuMemAlloc",
        )
        check(
            lib.cuMemcpyHtoD_v2(
                self._pointer, ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
            ),
            "cuMemcpyHtoD",
        )

    @property
    def address(self):
        return self._pointer.value

    def read(self):
        out = self._like.copy()
        check(
            library().cuMemcpyDtoH_v2(
                ctypes.c_void_p(out.ctypes.data), self._pointer, ctypes.c_size_t(out.nbytes)
            ),
            "cuMemcpyDtoH",
        )
        return out

    def __del__(self):
        library().cuMemFree_v2(self._pointer)


class Kernel:
    def __init__(self, cubin, entry, shared_bytes=0):
        lib = library()
        self._module = ctypes.c_void_p()
        check(lib.cuModuleLoadData(ctypes.byref(self._module), cubin), "cuModuleLoadData")
        self._function = ctypes.c_void_p()
        check(
            lib.cuModuleGetFunction(ctypes.byref(self._function), self._module, entry.encode()),
            "cuModuleGetFunction",
        )
        self.shared_bytes = shared_bytes
        if shared_bytes > 0:
            check(
                lib.cuFuncSetAttribute(self._function, _SHARED_BYTES_ATTRIBUTE, shared_bytes),
                "cuFuncSetAttribute",
            )

    def launch(self, grid, block, arguments, stream):
        """`arguments` are ctypes objects or buffers, passed by value."""
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        check(
            library().cuLaunchKernel(
                self._function,
                grid,
                1,
                1,
                block,
                1,
                1,
                self.shared_bytes,
                ctypes.c_void_p(stream),
                pointers,
                None,
            ),
            "cuLaunchKernel",
        )


def tensor_map(dtype, address, dims, strides, box, swizzle=SWIZZLE_128B):
    """CUtensorMap as a 64-byte aligned buffer of 128 bytes. strides: bytes, of axes 1 and up."""
    rank = len(dims)
    raw = (ctypes.c_char * 192)()
    offset = -ctypes.addressof(raw) % 64
    out = (ctypes.c_char * 128).from_buffer(raw, offset)
    status = library().cuTensorMapEncodeTiled(
        ctypes.byref(out),
        dtype,
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*([1] * rank)),
        0,
        swizzle,
        _PROMOTION_256B,
        0,
    )
    check(status, f"cuTensorMapEncodeTiled(dims={list(dims)}, strides={list(strides)})")
    return out
