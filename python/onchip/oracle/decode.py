"""Attention over caches, as section 2 of docs/semantics.md says it, Decode.

Each sequence's keys are gathered into a plain array, new ones included, and given to the formulas
of `attention`: nothing here knows pages, slots or splits beyond that.
"""

from typing import Any

import ml_dtypes
import numpy as np

from . import attention
from .attention import EXACT, Arithmetic

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def rounded(x: np.ndarray, dtype: Any) -> np.ndarray:
    """float64 to `dtype` in one rounding."""
    if np.dtype(dtype) != BFLOAT16:
        with np.errstate(over="ignore"):
            return x.astype(dtype)
    # ml_dtypes goes through float32. Truncated, with the last bit set where something was cut off,
    # a float32 stands on the same side of every bfloat16 tie as the float64.
    with np.errstate(over="ignore"):
        near = x.astype(np.float32)
    inexact = np.isfinite(x) & (near != x)
    down = np.where(np.abs(near) > np.abs(x), np.nextafter(near, np.float32(0)), near)
    bits = np.ascontiguousarray(down, np.float32).view(np.uint32) | inexact.astype(np.uint32)
    return bits.view(np.float32).astype(dtype)


def rotated(rows: np.ndarray, positions: np.ndarray, cos: Any, sin: Any, interleaved: bool) -> Any:
    """rows [n, heads, dim] turned to their positions [n], rounded once to their own dtype."""
    pairs = cos.shape[1]
    c = np.asarray(cos)[positions].astype(np.float64)[:, None, :]
    s = np.asarray(sin)[positions].astype(np.float64)[:, None, :]
    if interleaved:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    else:
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    x, y = rows[..., first].astype(np.float64), rows[..., second].astype(np.float64)
    result = rows.copy()
    with np.errstate(invalid="ignore"):
        result[..., first] = rounded(x * c - y * s, rows.dtype)
        result[..., second] = rounded(x * s + y * c, rows.dtype)
    return result


def _sequences(q, k_new, options):
    """(rows of q, rows of k_new, index of lse) of each sequence; no new rows: an empty slice."""
    cu_q, cu_new = options.get("cu_seqlens_q"), options.get("cu_seqlens_kv")
    used_q, used_new = options.get("seqlens_q"), options.get("seqlens_kv")
    if cu_new is None and used_new is None:
        used_new = used_q
    packed = cu_q is not None
    cu_new = cu_q if cu_new is None else cu_new
    for n in range(len(cu_q) - 1 if packed else q.shape[0]):
        begin = int(cu_q[n]) if packed else 0
        slot = int(cu_q[n + 1]) - begin if packed else q.shape[1]
        rows = slice(begin, begin + (slot if used_q is None else int(used_q[n])))
        new = slice(0, 0)
        if k_new is not None:
            begin = int(cu_new[n]) if packed else 0
            slot = int(cu_new[n + 1]) - begin if packed else k_new.shape[1]
            new = slice(begin, begin + (slot if used_new is None else int(used_new[n])))
        if packed:
            yield n, (rows,), (new,), (slice(None), rows)
        else:
            yield n, (n, rows), (n, new), (n, slice(None), rows)


def _of_sequence(options, n, q_rows, length_q, length_kv):
    """The options of attention_forward for one sequence alone, as a dense batch of one."""
    own = {
        name: value
        for name, value in options.items()
        if name in ("scale", "causal", "alignment", "window", "softcap", "sink")
    }
    for name in ("bias", "mask"):
        if (full := options.get(name)) is not None:
            part = full[0 if full.shape[0] == 1 else n][None]
            rows = slice(None) if part.shape[2] == 1 else slice(0, length_q)
            columns = slice(None) if part.shape[3] == 1 else slice(0, length_kv)
            own[name] = part[:, :, rows, columns]
    if (slopes := options.get("alibi_slopes")) is not None:
        own["alibi_slopes"] = slopes if slopes.ndim == 1 else slopes[n]
    if options.get("q_segment_ids") is not None:
        own["q_segment_ids"] = options["q_segment_ids"][q_rows][None]
        own["kv_segment_ids"] = options["kv_segment_ids"][n][None, :length_kv]
    return own


def attention_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    cache_seqlens: Any,
    k_new: Any = None,
    v_new: Any = None,
    page_table: Any = None,
    cache_slot: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = False,
    q_positions: Any = None,
    arithmetic: Arithmetic = EXACT,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(o, lse, k_cache, v_cache): copies of the caches as the call leaves them.

    v_new None with k_new given: v_cache is the first channels of k_cache.
    """
    dim_v = v_cache.shape[-1]
    k_after, v_after = k_cache.copy(), v_cache.copy()
    o = np.zeros((*q.shape[:-1], dim_v), arithmetic.products)
    lse_shape = (q.shape[0], q.shape[2], q.shape[1]) if q.ndim == 4 else (q.shape[1], q.shape[0])
    lse = np.full(lse_shape, -np.inf, arithmetic.products)

    block_rows = k_cache.shape[1]

    def place(n, positions):
        """Index of the sequence's rows at these positions in a cache."""
        if page_table is not None:
            return page_table[n][positions // block_rows], positions % block_rows
        return n if cache_slot is None else int(cache_slot[n]), positions

    runs = list(_sequences(q, k_new, options))
    runs = [run for run in runs if cache_slot is None or cache_slot[run[0]] >= 0]
    for n, _, new_rows, _ in runs:
        if k_new is None:
            continue
        new = k_new[new_rows]
        positions = int(cache_seqlens[n]) + np.arange(len(new))
        if rotary_cos is not None:
            new = rotated(new, positions, rotary_cos, rotary_sin, rotary_interleaved)
        k_after[place(n, positions)] = new
        v_after[place(n, positions)] = new[..., :dim_v] if v_new is None else v_new[new_rows]

    for n, q_rows, new_rows, lse_rows in runs:
        length_kv = int(cache_seqlens[n]) + new_rows[-1].stop - new_rows[-1].start
        where = place(n, np.arange(length_kv))
        queries = q[q_rows]
        length_q = len(queries)
        if rotary_cos is not None:
            if q_positions is None:
                positions = length_kv - length_q + np.arange(length_q)
            else:
                positions = q_positions[q_rows]
            queries = rotated(queries, positions, rotary_cos, rotary_sin, rotary_interleaved)
        own = _of_sequence(options, n, q_rows, length_q, length_kv)
        part_o, part_lse = attention.attention_forward(
            queries[None], k_after[where][None], v_after[where][None], arithmetic=arithmetic, **own
        )
        o[q_rows], lse[lse_rows] = part_o[0], part_lse[0]
    return o, lse, k_after, v_after
