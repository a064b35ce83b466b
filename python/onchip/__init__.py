"""Exact (softmax) attention and linear attention whose intermediates stay on the chip.

    import numpy, onchip
    q = k = v = numpy.random.default_rng(0).standard_normal((1, 1024, 8, 64), dtype="float32")
    o, lse = onchip.ops.attention_forward(q, k, v, causal=True)

`onchip.ops` has the operators; docs/semantics.md says what each of them means.
"""

from onchip import ops
from onchip._about import describe, explain, get_num_threads, set_num_threads
from onchip._kinds import ArraySpec
from onchip._native import version as _version
from onchip.errors import (
    CompileFailed,
    DeviceError,
    Error,
    InternalError,
    InvalidArgument,
    OutOfMemory,
    Unsupported,
)

__version__ = _version()

__all__ = [
    "ArraySpec",
    "CompileFailed",
    "DeviceError",
    "Error",
    "InternalError",
    "InvalidArgument",
    "OutOfMemory",
    "Unsupported",
    "__version__",
    "describe",
    "explain",
    "get_num_threads",
    "ops",
    "set_num_threads",
]
