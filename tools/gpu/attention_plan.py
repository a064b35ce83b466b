"""The attention forward plan (attention_forward_plan.hpp) for Python, through a small C++ library
that the system's compiler builds at first use."""

import ctypes
import dataclasses
import functools
import hashlib
import os
import subprocess
from pathlib import Path

from nvrtc import ROOT

_SOURCE = ROOT / "tools/gpu/attention_forward_plan.cpp"
_HEADER = ROOT / "src/gpu/kernels/sm90/attention_forward_plan.hpp"


@functools.cache
def library():
    digest = hashlib.sha256(_SOURCE.read_bytes() + _HEADER.read_bytes()).hexdigest()[:16]
    folder = Path(os.environ.get("ONCHIP_TOOLS_BUILD_DIR", ROOT / "build/tools"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"attention_plan-{digest}.so"
    if not path.exists():
        temporary = path.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [
                *(os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-shared", "-fPIC"),
                *(f"-I{ROOT / 'src'}", "-o", str(temporary), str(_SOURCE)),
            ],
            check=True,
        )
        temporary.replace(path)
    lib = ctypes.CDLL(str(path))
    for name in ("plan_entry", "plan_macro", "plan_file", "plan_reject", "plan_reject_tensor"):
        getattr(lib, name).restype = ctypes.c_char_p
    lib.plan_parts_bytes.restype = ctypes.c_longlong
    lib.plan_params.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_double,
        ctypes.c_void_p,
        ctypes.c_longlong,
        ctypes.c_longlong,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    return lib


@dataclasses.dataclass(frozen=True)
class Spec:
    bf16: int
    head_dim_qk: int
    head_dim_v: int
    causal: int
    varlen: int
    warpgroups: int
    tile_n: int
    q_in_registers: int
    turn_taking: int
    debug_waits: int

    @property
    def fields(self):
        return dataclasses.astuple(self)

    @property
    def name(self):
        dims = (
            f"{self.head_dim_qk}"
            if self.head_dim_qk == self.head_dim_v
            else (f"{self.head_dim_qk}x{self.head_dim_v}")
        )
        parts = ["attention_forward", "bf16" if self.bf16 else "fp16", f"d{dims}"]
        parts.append("causal" if self.causal else "full")
        parts += ["varlen"] if self.varlen else []
        parts.append(f"{64 * self.warpgroups}x{self.tile_n}")
        parts += ["qreg"] if self.q_in_registers else []
        parts += ["turns"] if self.turn_taking else []
        parts += ["debug"] if self.debug_waits else []
        return "_".join(parts)

    @property
    def array(self):
        return (ctypes.c_int * len(self.fields))(*self.fields)

    @property
    def define(self):
        return f"{library().plan_macro().decode()}={','.join(map(str, self.fields))}"

    @property
    def block(self):
        """tile_m, threads, shared bytes, parameter bytes."""
        out = (ctypes.c_int * 4)()
        library().plan_block(self.array, out)
        return tuple(out)


def kernel_text():
    return f'#include "{library().plan_file().decode()}"\n'


def _spec(fill):
    out = (ctypes.c_int * library().plan_spec_fields())()
    fill(out)
    return Spec(*out)


def registered():
    lib = library()
    return [
        _spec(lambda out, i=i: lib.plan_registered(i, out))
        for i in range(lib.plan_registered_count())
    ]


def select(bf16, head_dim_qk, head_dim_v, causal, varlen):
    return _spec(
        lambda out: library().plan_select(
            int(bf16), head_dim_qk, head_dim_v, int(causal), int(varlen), out
        )
    )
