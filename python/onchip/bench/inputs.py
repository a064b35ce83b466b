"""The arrays of a case: drawn once, for every implementation."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onchip.bench.cases import Case, LinearCase, StepCase

Array = Any  # a NumPy array of the case's dtype


@dataclass(frozen=True)
class Inputs:
    """q, k, v `[batch, seqlen, heads, head_dim]`, views of memory in PyTorch's order of axes
    (`[batch, heads, seqlen, head_dim]`): one memory for every implementation.

    In a step, k and v are what the cache holds, row by row; `more` has the page table if it is
    paged. In linear attention all lie as written, and `more` has the gates.
    """

    q: Array
    k: Array
    v: Array
    d_o: Array | None = None
    more: dict[str, Array] = field(default_factory=dict)


def dtype_of(name: str) -> Any:
    if name == "bf16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype({"fp64": "float64", "fp32": "float32", "fp16": "float16"}[name])


def _draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    batch, seqlen, heads, dim = shape
    drawn = rng.standard_normal((batch, heads, seqlen, dim), np.float32).astype(dtype, copy=False)
    return drawn.transpose(0, 2, 1, 3)


def draw_inputs(case: Case, seed: int) -> Inputs:
    """Normal numbers, rounded to the case's dtype."""
    rng = np.random.default_rng(seed)
    dtype = dtype_of(case.dtype)
    if isinstance(case, LinearCase):
        return _draw_linear(rng, case, dtype)
    q, k, v = (_draw(rng, shape, dtype) for shape in (case.shape, case.shape_kv, case.shape_kv))
    if isinstance(case, StepCase):
        # As caches lie: a token's heads beside each other.
        return Inputs(q, _as_cache(k), _as_cache(v), more=_pages(rng, case))
    return Inputs(q, k, v, None if case.phase == "fwd" else _draw(rng, case.shape, dtype))


def _empty_cache(shape: tuple[int, ...], dtype: Any) -> Array:
    """From the start of a line of memory on, as the allocators of frameworks place tensors; NumPy's
    large arrays begin 16 bytes into one."""
    line = 64
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + line, np.uint8)
    begin = -memory.ctypes.data % line
    return memory[begin : begin + size].view(dtype).reshape(shape)


def _as_cache(rows: Array) -> Array:
    cache = _empty_cache(rows.shape, rows.dtype)
    cache[...] = rows
    return cache


def _draw_linear(rng: np.random.Generator, case: LinearCase, dtype: Any) -> Inputs:
    """Keys of length 1, as a delta rule wants them; decays of 0.1 to 10 % a token."""

    def normal(shape: tuple[int, ...]) -> Array:
        return rng.standard_normal(shape, np.float32)

    k = normal(case.shape)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)

    def gate(name: str) -> Array:
        shape = case.gate_shape(name)
        if name == "log_decay":
            return -np.exp(rng.uniform(np.log(1e-3), np.log(0.1), shape)).astype(np.float32)
        return 1 / (1 + np.exp(-normal(shape)))

    return Inputs(
        normal(case.shape).astype(dtype),
        k.astype(dtype),
        normal(case.shape_v).astype(dtype),
        None if case.phase == "fwd" else normal(case.shape_v).astype(dtype),
        {name: gate(name) for name in case.gates},
    )


def _pages(rng: np.random.Generator, case: StepCase) -> dict[str, Array]:
    """The page table of a cache whose pages lie in random order."""
    if case.page_size is None:
        return {}
    pages = -(-case.seqlen // case.page_size)
    order = rng.permutation(case.batch * pages).astype(np.int32)
    return {"page_table": order.reshape(case.batch, pages)}


def paged(rows: Array, page_table: Array, page_size: int) -> Array:
    """`[batch, seqlen, heads, dim]` as pages `[pages, page_size, heads, dim]`; what is past the
    last row of a sequence is NaN."""
    batch, seqlen, heads, dim = rows.shape
    pages = page_table.shape[1]
    whole = np.full((batch, pages * page_size, heads, dim), np.nan, np.float32).astype(rows.dtype)
    whole[:, :seqlen] = rows
    cache = _empty_cache((batch * pages, page_size, heads, dim), rows.dtype)
    cache[page_table.reshape(-1)] = whole.reshape(batch * pages, page_size, heads, dim)
    return cache
