"""Random attention calls for property tests: any shapes, any options together, any dtype."""

from dataclasses import dataclass, field, replace

import numpy as np
from harness import DTYPES, draw, on_gpu
from hypothesis import strategies as st
from oracle import compare

import gpu

PER_PAIR = ("bias", "mask")
SEGMENTS = ("q_segment_ids", "kv_segment_ids")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv", "seqlens_q", "seqlens_kv")


@dataclass(frozen=True)
class Case:
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    d_o: np.ndarray
    d_lse: np.ndarray | None
    options: dict = field(repr=False)

    def __repr__(self):
        options = {
            name: f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else value
            for name, value in self.options.items()
        }
        return (
            f"Case({self.q.dtype}, q={self.q.shape}, k={self.k.shape}, v={self.v.shape}, {options})"
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


def _lengths(rng, num_seqs, longest):
    return rng.integers(0, longest + 1, num_seqs)


@st.composite
def cases(draw_from, dtypes=tuple(DTYPES), longest=None, packed=None, without=(), widest=40):
    """A Case; `without` names options that must not appear ("seqlens", "segments": both axes).

    On a GPU's backend, what its kernel takes."""
    head_dims = st.integers(1, widest)
    if on_gpu():
        without = (*without, *gpu.WITHOUT)
        head_dims = st.sampled_from(gpu.HEAD_DIMS)

    def chance(percent):
        return draw_from(st.integers(0, 99)) < percent

    def wanted(name, percent):
        return name not in without and chance(percent)

    if longest is None:
        # Within a tile, a tile or two, and over the largest tile and the largest task of rows.
        longest = draw_from(st.sampled_from([6, 40, 160]))
    rng = np.random.default_rng(draw_from(st.integers(0, 2**32 - 1)))
    dtype = np.dtype(draw_from(st.sampled_from(dtypes)))
    if on_gpu():
        dtype = gpu.DTYPES.get(dtype, dtype)
    num_seqs = draw_from(st.integers(1, 3))
    heads_kv = draw_from(st.integers(1, 3))
    heads_q = heads_kv * draw_from(st.integers(1, 3))
    dims = draw_from(st.tuples(head_dims, head_dims))
    is_packed = chance(40) if packed is None else packed
    options = {}

    if is_packed:
        # Slots are at least as long as what is used; more slack lies behind the last one.
        slots_q, slots_kv = (_lengths(rng, num_seqs, longest) for _ in range(2))
        index_dtype = draw_from(st.sampled_from([np.int32, np.int64]))
        slack = rng.integers(0, 4, 2)
        rows_q, rows_kv = int(slots_q.sum() + slack[0]), int(slots_kv.sum() + slack[1])
        options["cu_seqlens_q"] = np.concatenate([[0], np.cumsum(slots_q)]).astype(index_dtype)
        options["cu_seqlens_kv"] = np.concatenate([[0], np.cumsum(slots_kv)]).astype(index_dtype)
        shape_q, shape_kv = (rows_q, heads_q), (rows_kv, heads_kv)
        lse_shape, pair_rows = (heads_q, rows_q), (int(slots_q.max()), int(slots_kv.max()))
    else:
        seqlen_q, seqlen_kv = draw_from(st.tuples(st.integers(1, longest), st.integers(1, longest)))
        slots_q, slots_kv = np.full(num_seqs, seqlen_q), np.full(num_seqs, seqlen_kv)
        shape_q, shape_kv = (num_seqs, seqlen_q, heads_q), (num_seqs, seqlen_kv, heads_kv)
        lse_shape, pair_rows = (num_seqs, heads_q, seqlen_q), (seqlen_q, seqlen_kv)
    if wanted("seqlens", 25):
        options["seqlens_q"] = rng.integers(0, slots_q + 1).astype(np.int32)
        options["seqlens_kv"] = rng.integers(0, slots_kv + 1).astype(np.int64)

    options["causal"] = wanted("causal", 40)
    if chance(40):
        options["alignment"] = "top_left"
    if wanted("window", 30):
        options["window"] = draw_from(st.tuples(st.integers(-1, longest), st.integers(-1, longest)))
    if wanted("softcap", 25):
        options["softcap"] = draw_from(st.sampled_from([0.5, 2.0, 30.0]))
    if chance(25):
        options["scale"] = draw_from(st.sampled_from([1.0, 0.1, -0.3]))
    pair_shape = (num_seqs, heads_q, *pair_rows)
    for name in PER_PAIR:
        if wanted(name, 30):
            kept = [draw_from(st.booleans()) for _ in pair_shape]
            shape = tuple(n if keep else 1 for n, keep in zip(pair_shape, kept, strict=True))
            if name == "mask":
                options[name] = rng.random(shape) < 0.7
            else:
                bias = draw(rng, shape, draw_from(st.sampled_from(DTYPES)))
                bias[rng.random(shape) < 0.1] = -np.inf
                options[name] = bias
    if wanted("alibi_slopes", 20):
        shape = (heads_q,) if chance(50) else (num_seqs, heads_q)
        options["alibi_slopes"] = rng.random(shape).astype(np.float32)
    if wanted("segments", 20):
        options["q_segment_ids"] = rng.integers(0, 2, shape_q[:-1], dtype=np.int32)
        options["kv_segment_ids"] = rng.integers(0, 2, shape_kv[:-1], dtype=np.int32)
    if wanted("sink", 30):
        options["sink"] = draw(rng, (heads_q,), draw_from(st.sampled_from(DTYPES)))
    if wanted("dropout", 20):
        options["dropout_p"] = draw_from(st.sampled_from([0.1, 0.5]))
        options["dropout_rng"] = np.array(
            [rng.integers(-(2**62), 2**62), rng.integers(0, 2**32)], np.int64
        )
    d_lse = draw(rng, lse_shape, compare.lse_dtype(dtype)) if chance(50) else None
    return Case(
        draw(rng, (*shape_q, dims[0]), dtype),
        draw(rng, (*shape_kv, dims[0]), dtype),
        draw(rng, (*shape_kv, dims[1]), dtype),
        draw(rng, (*shape_q, dims[1]), dtype),
        d_lse,
        options,
    )
