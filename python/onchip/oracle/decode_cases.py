"""Random calls of attention_decode: contiguous and paged caches, any lengths, any options together.

Every row of a cache that no sequence of the call has filled holds NaN, and every entry of a page
table that none uses holds nonsense.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .cases import DTYPES, PER_PAIR, Chooser, Integer, described, draw

NONSENSE = (-1, -(2**31), 2**31 - 1, 12345)


@dataclass(frozen=True)
class DecodeCase:
    q: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray
    arguments: dict = field(repr=False)

    def __repr__(self):
        arguments = {name: described(value) for name, value in self.arguments.items()}
        return (
            f"{self.q.dtype}, q={self.q.shape}, k_cache={self.k_cache.shape},"
            f" v_cache={self.v_cache.shape}, {arguments}"
        )

    @property
    def values_in_keys(self) -> bool:
        return "k_new" in self.arguments and "v_new" not in self.arguments

    def caches(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies that a call may write to."""
        k = self.k_cache.copy()
        return k, k[..., : self.v_cache.shape[-1]] if self.values_in_keys else self.v_cache.copy()


def _lengths(choose: Chooser, num_seqs: int, longest: int):
    return choose.rng.integers(0, longest + 1, num_seqs)


def decode_case(
    integer: Integer,
    dtypes: Sequence[Any] = DTYPES,
    longest: int | None = None,
    paged: bool | None = None,
    without: Sequence[str] = (),
    head_dims: Sequence[int] = range(1, 41),
) -> DecodeCase:
    """`longest`: the most keys of a sequence. `without` names arguments that must not appear."""
    choose = Chooser(integer)
    rng = choose.rng

    def wanted(name, percent):
        return name not in without and choose.chance(percent)

    if longest is None:
        # Within a tile, over a few, and over several parts of a split.
        longest = choose.pick([6, 40, 160, 160, 1300])
    dtype = np.dtype(choose.pick(dtypes))
    num_seqs = integer(1, 4)
    heads_kv = integer(1, 3)
    heads_q = heads_kv * integer(1, 5)
    dim_qk, dim_v = choose.pick(head_dims), choose.pick(head_dims)
    in_keys = wanted("values_in_keys", 15)
    if in_keys:
        dim_v = min(dim_v, dim_qk)
    arguments: dict[str, Any] = {}

    # ---- lengths: of the queries, the new rows, the cached ones
    appends = wanted("k_new", 70) or in_keys
    most_q, most_new = choose.pick([1, 1, 5, 20]), min(choose.pick([1, 1, 4, 30]), longest)
    packed = choose.chance(30)
    len_q, len_new = _lengths(choose, num_seqs, most_q), _lengths(choose, num_seqs, most_new)
    if packed:
        shared = choose.chance(40)
        if shared:
            len_q = len_new
        starts_q = np.concatenate([[0], np.cumsum(len_q)])
        starts_new = np.concatenate([[0], np.cumsum(len_new)])
        index_dtype = choose.pick([np.int32, np.int64])
        arguments["cu_seqlens_q"] = starts_q.astype(index_dtype)
        if appends and not shared:
            arguments["cu_seqlens_kv"] = starts_new.astype(index_dtype)
        slack = integer(0, 3)
        rows_q: tuple = (int(starts_q[-1]) + slack,)
        rows_new: tuple = (int(starts_new[-1]) + slack,)
        slots_q, slots_new = len_q, len_new
    else:
        rows_q, rows_new = (num_seqs, integer(1, most_q)), (num_seqs, integer(1, most_new))
        slots_q = np.full(num_seqs, rows_q[-1])
        slots_new = np.full(num_seqs, rows_new[-1])
    if wanted("seqlens", 25):
        len_q = rng.integers(0, slots_q + 1)
        arguments["seqlens_q"] = len_q.astype(np.int32)
        len_new = np.minimum(rng.integers(0, slots_new + 1), slots_new)
        if appends:
            arguments["seqlens_kv"] = len_new.astype(np.int64)
    else:
        len_q, len_new = slots_q, slots_new
    if not appends:
        len_new = np.zeros(num_seqs, np.int64)
    cached = rng.integers(0, longest - len_new + 1)
    if wanted("q longer than keys", 80):
        # Only a few queries without keys.
        cached = np.maximum(cached, np.minimum(len_q, longest) - len_new)
    cached = np.clip(cached, 0, longest - len_new)
    total = cached + len_new
    arguments["cache_seqlens"] = cached.astype(np.int32)

    # ---- caches: NaN but for the rows in use
    is_paged = choose.chance(50) if paged is None else paged
    skipped = rng.random(num_seqs) < 0.2 if wanted("cache_slot", 50) else None
    if is_paged:
        page_size = choose.pick([1, 3, 16, 64])
        max_pages = -(-longest // page_size) + integer(0, 2)
        used = -(-total // page_size)
        pages = rng.permutation(int(used.sum()) + integer(0, 3))
        table = rng.choice(NONSENSE, (num_seqs, max_pages)).astype(np.int32)
        first = 0
        for n in range(num_seqs):
            if skipped is not None and skipped[n]:
                continue
            table[n, : used[n]] = pages[first : first + used[n]]
            first += int(used[n])
        arguments["page_table"] = table
        if skipped is not None:
            arguments["cache_slot"] = np.where(skipped, -1, rng.integers(0, 99, num_seqs))
        blocks, block_rows = len(pages), page_size
    else:
        blocks, block_rows = num_seqs + integer(0, 2), longest + integer(0, 9)
        slots = np.arange(num_seqs)
        if skipped is not None:
            slots = np.where(skipped, -1, rng.permutation(blocks)[:num_seqs])
            arguments["cache_slot"] = slots
    if skipped is not None:
        arguments["cache_slot"] = arguments["cache_slot"].astype(np.int32)
    k_cache = np.full((blocks, block_rows, heads_kv, dim_qk), np.nan, dtype)
    v_cache = (
        k_cache[..., :dim_v] if in_keys else np.full((*k_cache.shape[:3], dim_v), np.nan, dtype)
    )
    for n in range(num_seqs):
        if skipped is not None and skipped[n]:
            arguments["cache_seqlens"][n] = choose.pick([-5, 2**30, 0])
            continue
        j = np.arange(cached[n])
        where = (table[n][j // block_rows], j % block_rows) if is_paged else (slots[n], j)
        k_cache[where] = draw(rng, (len(j), heads_kv, dim_qk), dtype)
        if not in_keys:
            v_cache[where] = draw(rng, (len(j), heads_kv, dim_v), dtype)
    if appends:
        arguments["k_new"] = draw(rng, (*rows_new, heads_kv, dim_qk), dtype)
        if not in_keys:
            arguments["v_new"] = draw(rng, (*rows_new, heads_kv, dim_v), dtype)

    # ---- rotation
    if dim_qk >= 2 and wanted("rotary", 40):
        pairs = integer(1, dim_qk // 2)
        positions = int(total.max()) + integer(0, 5)
        table_dtype = choose.pick([dtype, np.dtype(np.float32)])
        angles = rng.uniform(0, 6.3, (positions, pairs))
        arguments["rotary_cos"] = np.cos(angles).astype(table_dtype)
        arguments["rotary_sin"] = np.sin(angles).astype(table_dtype)
        arguments["rotary_interleaved"] = choose.chance(50)
        active = len_q > total if skipped is None else (len_q > total) & ~skipped
        if choose.chance(30) or active.any():
            arguments["q_positions"] = rng.integers(0, max(positions, 1), rows_q).astype(
                choose.pick([np.int32, np.int64])
            )
            if positions == 0:
                for name in [*arguments]:
                    if name.startswith(("rotary", "q_positions")):
                        del arguments[name]

    # ---- options
    arguments["causal"] = wanted("causal", 50)
    if choose.chance(20):
        arguments["alignment"] = "top_left"
    if wanted("window", 30):
        arguments["window"] = integer(-1, longest), integer(-1, longest)
    if wanted("softcap", 25):
        arguments["softcap"] = choose.pick([0.5, 2.0, 30.0])
    if choose.chance(25):
        arguments["scale"] = choose.pick([1.0, 0.1, -0.3])
    columns = int(total.max()) + integer(0, 3)
    pair_rows = int(slots_q.max()) if packed else rows_q[-1]
    pair_shape = (num_seqs, heads_q, pair_rows, columns)
    for name in PER_PAIR:
        if wanted(name, 25):
            shape = tuple(n if choose.chance(50) else 1 for n in pair_shape)
            if name == "mask":
                arguments[name] = rng.random(shape) < 0.7
            else:
                bias = draw(rng, shape, choose.pick(DTYPES))
                bias[rng.random(shape) < 0.1] = -np.inf
                arguments[name] = bias
    if wanted("alibi_slopes", 20):
        shape = (heads_q,) if choose.chance(50) else (num_seqs, heads_q)
        arguments["alibi_slopes"] = rng.random(shape).astype(np.float32)
    if wanted("segments", 20):
        arguments["q_segment_ids"] = rng.integers(0, 2, rows_q, dtype=np.int32)
        arguments["kv_segment_ids"] = rng.integers(0, 2, (num_seqs, columns), dtype=np.int32)
    if wanted("sink", 30):
        arguments["sink"] = draw(rng, (heads_q,), choose.pick(DTYPES))
    return DecodeCase(draw(rng, (*rows_q, heads_q, dim_qk), dtype), k_cache, v_cache, arguments)
