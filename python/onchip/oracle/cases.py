"""Random calls: any shapes, any options together, any dtype.

What a case holds is decided by a function `integer(smallest, largest)`, both inclusive: a random
generator's, or that of a test library that knows how to simplify a failing case.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from . import compare

Integer = Callable[[int, int], int]

DTYPES = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
PER_PAIR = ("bias", "mask")


def draw(rng, shape, dtype, size=1.0):
    """Normal numbers of standard deviation `size`, rounded to the dtype."""
    return (size * rng.standard_normal(shape)).astype(dtype)


def described(value):
    """An option in few words: of an array its dtype and shape."""
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else value


class Chooser:
    def __init__(self, integer: Integer) -> None:
        self.integer = integer
        self.rng = np.random.default_rng(integer(0, 2**32 - 1))

    def chance(self, percent: int) -> bool:
        return self.integer(0, 99) < percent

    def pick(self, choices: Sequence[Any]) -> Any:
        return choices[self.integer(0, len(choices) - 1)]


@dataclass(frozen=True)
class AttentionCase:
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    d_o: np.ndarray
    d_lse: np.ndarray | None
    options: dict = field(repr=False)

    def __repr__(self):
        options = {name: described(value) for name, value in self.options.items()}
        d_lse = "" if self.d_lse is None else ", d_lse"
        return (
            f"{self.q.dtype}, q={self.q.shape}, k={self.k.shape}, v={self.v.shape}{d_lse},"
            f" {options}"
        )

    @property
    def packed(self):
        return self.q.ndim == 3

    @property
    def tensors(self):
        return self.q, self.k, self.v

    def map_arrays(self, change):
        """The same case with every array x replaced by change(x)."""
        options = {
            name: change(value) if isinstance(value, np.ndarray) else value
            for name, value in self.options.items()
        }
        d_lse = None if self.d_lse is None else change(self.d_lse)
        tensors = {name: change(getattr(self, name)) for name in ("q", "k", "v", "d_o")}
        return replace(self, **tensors, d_lse=d_lse, options=options)


@dataclass(frozen=True)
class MergeCase:
    o1: np.ndarray
    lse1: np.ndarray
    o2: np.ndarray
    lse2: np.ndarray

    def map_arrays(self, change):
        return MergeCase(*(change(x) for x in (self.o1, self.lse1, self.o2, self.lse2)))

    def __repr__(self):
        return f"{self.o1.dtype}, o={self.o1.shape}, lse={self.lse1.shape}"


def attention_case(
    integer: Integer,
    dtypes: Sequence[Any] = DTYPES,
    longest: int | None = None,
    packed: bool | None = None,
    without: Sequence[str] = (),
    head_dims: Sequence[int] = range(1, 41),
) -> AttentionCase:
    """`without` names options that must not appear ("seqlens", "segments": both axes)."""
    choose = Chooser(integer)
    rng = choose.rng

    def wanted(name, percent):
        return name not in without and choose.chance(percent)

    if longest is None:
        # Within a tile, a tile or two, and over the largest tile and the largest task of rows.
        longest = choose.pick([6, 40, 160])
    dtype = np.dtype(choose.pick(dtypes))
    num_seqs = integer(1, 3)
    heads_kv = integer(1, 3)
    heads_q = heads_kv * integer(1, 3)
    dims = choose.pick(head_dims), choose.pick(head_dims)
    is_packed = choose.chance(40) if packed is None else packed
    options: dict[str, Any] = {}

    if is_packed:
        # Slots are at least as long as what is used; more slack lies behind the last one.
        slots_q, slots_kv = (rng.integers(0, longest + 1, num_seqs) for _ in range(2))
        index_dtype = choose.pick([np.int32, np.int64])
        slack = rng.integers(0, 4, 2)
        rows_q, rows_kv = int(slots_q.sum() + slack[0]), int(slots_kv.sum() + slack[1])
        options["cu_seqlens_q"] = np.concatenate([[0], np.cumsum(slots_q)]).astype(index_dtype)
        options["cu_seqlens_kv"] = np.concatenate([[0], np.cumsum(slots_kv)]).astype(index_dtype)
        shape_q, shape_kv = (rows_q, heads_q), (rows_kv, heads_kv)
        lse_shape, pair_rows = (heads_q, rows_q), (int(slots_q.max()), int(slots_kv.max()))
    else:
        seqlen_q, seqlen_kv = integer(1, longest), integer(1, longest)
        slots_q, slots_kv = np.full(num_seqs, seqlen_q), np.full(num_seqs, seqlen_kv)
        shape_q, shape_kv = (num_seqs, seqlen_q, heads_q), (num_seqs, seqlen_kv, heads_kv)
        lse_shape, pair_rows = (num_seqs, heads_q, seqlen_q), (seqlen_q, seqlen_kv)
    if wanted("seqlens", 25):
        options["seqlens_q"] = rng.integers(0, slots_q + 1).astype(np.int32)
        options["seqlens_kv"] = rng.integers(0, slots_kv + 1).astype(np.int64)

    options["causal"] = wanted("causal", 40)
    if choose.chance(40):
        options["alignment"] = "top_left"
    if wanted("window", 30):
        options["window"] = integer(-1, longest), integer(-1, longest)
    if wanted("softcap", 25):
        options["softcap"] = choose.pick([0.5, 2.0, 30.0])
    if choose.chance(25):
        options["scale"] = choose.pick([1.0, 0.1, -0.3])
    pair_shape = (num_seqs, heads_q, *pair_rows)
    for name in PER_PAIR:
        if wanted(name, 30):
            shape = tuple(n if choose.chance(50) else 1 for n in pair_shape)
            if name == "mask":
                options[name] = rng.random(shape) < 0.7
            else:
                bias = draw(rng, shape, choose.pick(DTYPES))
                bias[rng.random(shape) < 0.1] = -np.inf
                options[name] = bias
    if wanted("alibi_slopes", 20):
        shape = (heads_q,) if choose.chance(50) else (num_seqs, heads_q)
        options["alibi_slopes"] = rng.random(shape).astype(np.float32)
    if wanted("segments", 20):
        options["q_segment_ids"] = rng.integers(0, 2, shape_q[:-1], dtype=np.int32)
        options["kv_segment_ids"] = rng.integers(0, 2, shape_kv[:-1], dtype=np.int32)
    if wanted("sink", 30):
        options["sink"] = draw(rng, (heads_q,), choose.pick(DTYPES))
    if wanted("dropout", 20):
        options["dropout_p"] = choose.pick([0.1, 0.5])
        options["dropout_rng"] = np.array(
            [rng.integers(-(2**62), 2**62), rng.integers(0, 2**32)], np.int64
        )
    d_lse = draw(rng, lse_shape, compare.lse_dtype(dtype)) if choose.chance(50) else None
    return AttentionCase(
        draw(rng, (*shape_q, dims[0]), dtype),
        draw(rng, (*shape_kv, dims[0]), dtype),
        draw(rng, (*shape_kv, dims[1]), dtype),
        draw(rng, (*shape_q, dims[1]), dtype),
        d_lse,
        options,
    )


def merge_case(
    integer: Integer, dtypes: Sequence[Any] = DTYPES, longest: int | None = None
) -> MergeCase:
    """Two parts of the same queries; rows that saw no key in one of them, or in both, among
    them."""
    choose = Chooser(integer)
    rng = choose.rng
    dtype = np.dtype(choose.pick(dtypes))
    if longest is None:
        longest = choose.pick([6, 200])
    seqlen, heads = integer(0, longest), integer(1, 5)
    batch = () if choose.chance(40) else (integer(1, 3),)

    def part():
        lse = draw(rng, (*batch, heads, seqlen), compare.lse_dtype(dtype), size=3.0)
        lse[rng.random(lse.shape) < 0.2] = -np.inf
        o = draw(rng, (*batch, seqlen, heads, head_dim), dtype)
        o[np.swapaxes(lse, -1, -2) == -np.inf] = 0
        return o, lse

    head_dim = integer(1, 256)
    return MergeCase(*part(), *part())
