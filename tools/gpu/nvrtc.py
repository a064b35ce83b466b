"""NVRTC through ctypes: finds it, compiles kernel text of src/ to a cubin. Needs no GPU."""

import ctypes
import functools
import glob
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Lines of source in the cubin, for compute-sanitizer; the machine code is the same.
LINE_INFO = os.environ.get("ONCHIP_TOOLS_LINE_INFO") == "1"
ARCHITECTURE = "sm_90a"
OPTIONS = [
    "-std=c++20",
    "-default-device",
    f"-arch={ARCHITECTURE}",
    f"-I{ROOT / 'src'}",
    "--ptxas-options=-v",
    *(["-lineinfo"] if LINE_INFO else []),
]


class Missing(Exception):
    """No NVRTC on this machine."""


def _candidates():
    for folder in sys.path:
        yield from sorted(glob.glob(os.path.join(folder, "nvidia", "*", "lib")))
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    yield from (os.path.join(home, "lib64"),)


@functools.cache
def library():
    for folder in _candidates():
        nvrtc = glob.glob(os.path.join(folder, "libnvrtc.so.1[23]"))
        builtins = glob.glob(os.path.join(folder, "libnvrtc-builtins.so.1[23].[0-9]"))
        if nvrtc and builtins:
            # Opened by absolute path, NVRTC does not find its builtins by itself.
            ctypes.CDLL(builtins[0], mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(nvrtc[0])
    raise Missing("no libnvrtc.so.12 or .13 in site-packages/nvidia/*/lib or CUDA_HOME/lib64")


def version():
    major, minor = ctypes.c_int(), ctypes.c_int()
    library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _text(program, get_size, get):
    size = ctypes.c_size_t()
    get_size(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    get(program, buffer)
    return buffer.raw


def compile_text(text, name, defines=(), options=()):
    """(cubin or None, log). `defines` are NAME=value strings."""
    lib = library()
    program = ctypes.c_void_p()
    status = lib.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), name.encode(), 0, None, None
    )
    if status != 0:
        raise RuntimeError(f"nvrtcCreateProgram: {status}")
    try:
        given = [*OPTIONS, *options, *(f"-D{d}" for d in defines)]
        array = (ctypes.c_char_p * len(given))(*(o.encode() for o in given))
        status = lib.nvrtcCompileProgram(program, len(given), array)
        log = _text(program, lib.nvrtcGetProgramLogSize, lib.nvrtcGetProgramLog)
        log = log.rstrip(b"\0").decode()
        if status != 0:
            return None, log
        return _text(program, lib.nvrtcGetCUBINSize, lib.nvrtcGetCUBIN), log
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))
