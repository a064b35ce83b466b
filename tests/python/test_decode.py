"""Attention over caches: append, pages, slots, rotation, against the formula and against itself."""

from itertools import pairwise

import numpy as np
import pytest
from harness import (
    BFLOAT16,
    DTYPES,
    assert_same_bits,
    check_decode,
    decode,
    draw,
    dtype_name,
    forward,
    poisoned,
    restrided,
)
from hypothesis import given
from hypothesis import strategies as st

import onchip
from onchip.oracle import compare
from onchip.oracle.decode import rotated
from onchip.oracle.decode_cases import decode_case

I4 = np.int32


@st.composite
def decode_cases(draw_from, **limits):
    return decode_case(lambda low, high: draw_from(st.integers(low, high)), **limits)


def caches_of(rng, dtype, slots=2, capacity=40, heads=2, dims=(16, 16), lengths=()):
    """NaN but for the first rows of each slot."""
    k = np.full((slots, capacity, heads, dims[0]), np.nan, dtype)
    v = np.full((slots, capacity, heads, dims[1]), np.nan, dtype)
    for n, length in enumerate(lengths):
        k[n, :length] = draw(rng, (length, heads, dims[0]), dtype)
        v[n, :length] = draw(rng, (length, heads, dims[1]), dtype)
    return k, v


def paged_copy(rng, k_cache, v_cache, page_size, spare=3):
    """The same rows in pages in random order, and the table that finds them."""
    slots, capacity = k_cache.shape[:2]
    max_pages = -(-capacity // page_size)
    order = rng.permutation(slots * max_pages + spare)
    table = order[: slots * max_pages].reshape(slots, max_pages).astype(I4)
    pages = []
    for cache in (k_cache, v_cache):
        padded = np.full((slots, max_pages * page_size, *cache.shape[2:]), np.nan, cache.dtype)
        padded[:, :capacity] = cache
        paged = np.full((len(order), page_size, *cache.shape[2:]), np.nan, cache.dtype)
        paged[table] = padded.reshape(slots, max_pages, page_size, *cache.shape[2:])
        pages.append(paged)
    return (*pages, table)


@given(case=decode_cases())
def test_random_calls(decode_backend, case):
    k, v = case.caches()
    result = decode(decode_backend, case.q, k, v, **case.arguments)
    compare.judge_decode(result, (k, v), case.q, case.k_cache, case.v_cache, **case.arguments)


@given(case=decode_cases(without=("values_in_keys",)), seed=st.integers(0, 2**32 - 1))
def test_layout_and_what_lies_around_do_not_matter(decode_backend, case, seed):
    rng = np.random.default_rng(seed)
    k, v = case.caches()
    wanted = decode(decode_backend, case.q, k, v, **case.arguments)
    moved = {
        name: poisoned(restrided(x, rng), rng)
        if isinstance(x, np.ndarray) and name not in ("cu_seqlens_q", "cu_seqlens_kv")
        else x
        for name, x in case.arguments.items()
    }
    writes = "k_new" in case.arguments
    k_moved, v_moved = (poisoned(x, rng) for x in (case.k_cache, case.v_cache))
    if not writes:
        k_moved, v_moved = restrided(k_moved, rng), restrided(v_moved, rng)
    result = decode(decode_backend, poisoned(case.q, rng), k_moved, v_moved, **moved)
    assert_same_bits(result, wanted)
    compare.assert_bitwise("k_cache", k_moved, k)
    compare.assert_bitwise("v_cache", v_moved, v)


@given(case=decode_cases(paged=False, without=("values_in_keys",)), seed=st.integers(0, 2**32 - 1))
def test_pages_are_an_indirection_alone(decode_backend, case, seed):
    rng = np.random.default_rng(seed)
    arguments = dict(case.arguments)
    rows = len(arguments["cache_seqlens"])
    slots = arguments.pop("cache_slot", np.arange(rows, dtype=I4))
    k, v = case.caches()
    wanted = decode(decode_backend, case.q, k, v, cache_slot=slots, **arguments)
    for page_size in (1, 16, 256):
        k_pages, v_pages, table = paged_copy(rng, case.k_cache, case.v_cache, page_size)
        result = decode(
            decode_backend,
            case.q,
            k_pages,
            v_pages,
            page_table=table[slots],
            cache_slot=np.minimum(slots, 0),
            **arguments,
        )
        assert_same_bits(result, wanted)
        for paged, cache in ((k_pages, k), (v_pages, v)):
            back = paged[table].reshape(cache.shape[0], -1, *cache.shape[2:])
            compare.assert_bitwise("cache", back[:, : cache.shape[1]], cache)


@given(case=decode_cases(), seed=st.integers(0, 2**32 - 1))
def test_room_changes_no_bits(decode_backend, case, seed):
    """Neither capacity nor max_pages, nor how many pages there are (A33)."""
    rng = np.random.default_rng(seed)
    k, v = case.caches()
    wanted = decode(decode_backend, case.q, k, v, batch_invariant=True, **case.arguments)
    arguments = dict(case.arguments)
    more = int(rng.integers(1, 2000))
    if "page_table" in arguments:
        table = arguments["page_table"]
        arguments["page_table"] = np.pad(table, ((0, 0), (0, more)), constant_values=-77)
        pad = ((0, 2), (0, 0), (0, 0), (0, 0))
    else:
        pad = ((0, 0), (0, more), (0, 0), (0, 0))
    k2, v2 = case.caches()
    k2 = np.pad(k2, pad, constant_values=k2.dtype.type(np.nan))
    if case.values_in_keys:
        v2 = k2[..., : v2.shape[-1]]
    else:
        v2 = np.pad(v2, pad, constant_values=v2.dtype.type(np.nan))
    hints = dict(max_seqlen_q=1, max_seqlen_kv=3)
    assert_same_bits(
        decode(decode_backend, case.q, k2, v2, batch_invariant=True, **hints, **arguments), wanted
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("rotary", [False, True])
def test_steps_and_chunks_are_one_prefill(decode_backend, dtype, rotary):
    """Tokens one by one, in uneven chunks, or all at once: attention_forward of the whole."""
    rng = np.random.default_rng(1)
    batch, length, heads = 2, 70, (4, 2)
    q = draw(rng, (batch, length, heads[0], 24), dtype)
    k = draw(rng, (batch, length, heads[1], 24), dtype)
    v = draw(rng, (batch, length, heads[1], 20), dtype)
    tables = {}
    turned_q, turned_k = q, k
    if rotary:
        angles = rng.uniform(0, 6, (length, 8))
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        tables = dict(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=True)
        turned_q, turned_k = (
            np.stack([rotated(row, np.arange(length), cos, sin, True) for row in x]) for x in (q, k)
        )
    wanted_o, wanted_lse = forward(decode_backend, turned_q, turned_k, v, causal=True)
    for cuts in ([*range(length + 1)], [0, 1, 33, 34, 64, 70], [0, 70]):
        k_cache, v_cache = caches_of(rng, dtype, batch, 80, heads[1], (24, 20))
        parts = []
        for begin, end in pairwise(cuts):
            new = slice(begin, end)
            arguments = dict(k_new=k[:, new], v_new=v[:, new], causal=True, **tables)
            parts.append(
                decode(
                    decode_backend,
                    q[:, new],
                    k_cache,
                    v_cache,
                    cache_seqlens=np.full(batch, begin, I4),
                    **arguments,
                )
            )
        compare.assert_same_value("o", np.concatenate([o for o, _ in parts], 1), wanted_o)
        compare.assert_same_value("lse", np.concatenate([x for _, x in parts], 2), wanted_lse)
        compare.assert_bitwise("k_cache", k_cache[:, :length], turned_k)
        assert np.isnan(k_cache[:, length:].astype(np.float32)).all()


def test_prefill_and_decode_of_a_row_have_the_same_bits(decode_backend):
    """A33: the last row of a chunk, and that row alone, over 1,300 keys."""
    rng = np.random.default_rng(2)
    k_cache, v_cache = caches_of(rng, np.float32, 1, 1400, 2, (64, 64), [1300])
    q = draw(rng, (1, 9, 14, 64), np.float32)
    chunk = decode(decode_backend, q, k_cache, v_cache, cache_seqlens=[1300], causal=True)
    for i in range(9):
        alone = decode(
            decode_backend, q[:, i : i + 1], k_cache, v_cache, cache_seqlens=[1300 - 8 + i]
        )
        compare.assert_bitwise("o", alone[0][0, 0], chunk[0][0, i])
        compare.assert_bitwise("lse", alone[1][0, :, 0], chunk[1][0, :, i])


def test_a_row_does_not_depend_on_the_rest_of_the_call(decode_backend):
    """A33: alone, and beside other rows of other lengths."""
    rng = np.random.default_rng(3)
    lengths = [1980, 0, 7, 600]
    k_cache, v_cache = caches_of(rng, np.float32, 4, 2000, 2, (64, 64), lengths)
    q = draw(rng, (4, 1, 14, 64), np.float32)
    together = decode(
        decode_backend, q, k_cache, v_cache, cache_seqlens=lengths, batch_invariant=True
    )
    for n, length in enumerate(lengths):
        alone = decode(
            decode_backend,
            q[n : n + 1],
            k_cache,
            v_cache,
            cache_seqlens=[length],
            cache_slot=[n],
            batch_invariant=True,
        )
        compare.assert_bitwise("o", alone[0][0], together[0][n])
        compare.assert_bitwise("lse", alone[1][0], together[1][n])


def test_the_number_of_threads_changes_no_bits(decode_backend):
    rng = np.random.default_rng(4)
    case = dict(lengths=[3000, 17, 900])
    k_cache, v_cache = caches_of(rng, BFLOAT16, 3, 3100, 3, (40, 48), **case)
    q = draw(rng, (3, 2, 9, 40), BFLOAT16)
    new = dict(k_new=draw(rng, (3, 2, 3, 40), BFLOAT16), v_new=draw(rng, (3, 2, 3, 48), BFLOAT16))
    results = []
    try:
        for threads in (1, 2, 3, 7):
            onchip.set_num_threads(threads)
            k, v = k_cache.copy(), v_cache.copy()
            lengths = case["lengths"]
            result = decode(decode_backend, q, k, v, cache_seqlens=lengths, causal=True, **new)
            results.append((result, k, v))
    finally:
        onchip.set_num_threads(0)
    for result, k, v in results[1:]:
        assert_same_bits(result, results[0][0])
        compare.assert_bitwise("k", k, results[0][1])
        compare.assert_bitwise("v", v, results[0][2])


# ---- pages


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_shared_prefix(decode_backend, page_size):
    """A37: two sequences share the pages of their common beginning, each appends to its own."""
    rng = np.random.default_rng(5)
    prefix, rest = 2 * page_size, page_size // 2
    k = draw(rng, (5, page_size, 2, 32), np.float32)
    v = draw(rng, (5, page_size, 2, 32), np.float32)
    table = np.array([[3, 0, 4], [3, 0, 1]], I4)
    q = draw(rng, (2, 1, 4, 32), np.float32)
    new = dict(
        k_new=draw(rng, (2, 1, 2, 32), np.float32), v_new=draw(rng, (2, 1, 2, 32), np.float32)
    )
    lengths = np.full(2, prefix + rest, I4)
    check_decode(decode_backend, q, k, v, cache_seqlens=lengths, page_table=table, **new)


def test_split_pages_write_every_row(decode_backend):
    """A34: pages of 256 x 4, one query each; whatever the split, no row stays as it was."""
    rng = np.random.default_rng(6)
    k = draw(rng, (8, 256, 4, 64), np.float32)
    v = draw(rng, (8, 256, 4, 64), np.float32)
    table = rng.permutation(8).reshape(2, 4).astype(I4)
    q = draw(rng, (2, 1, 4, 64), np.float32)
    for lengths in ([1024, 1024], [1, 1024], [513, 255], [512, 0]):
        check_decode(decode_backend, q, k, v, cache_seqlens=np.array(lengths, I4), page_table=table)


# ---- slots


def test_skipped_rows(decode_backend):
    rng = np.random.default_rng(7)
    k_cache, v_cache = caches_of(rng, np.float32, 4, 12, lengths=[3, 5, 7, 9])
    q = draw(rng, (4, 2, 4, 16), np.float32)
    q[1] = np.nan
    slots = np.array([2, -1, 0, -1], I4)
    lengths = np.array([7, 10**9, 3, -4], I4)
    k_new, v_new = draw(rng, (4, 2, 2, 16), np.float32), draw(rng, (4, 2, 2, 16), np.float32)
    o, lse = check_decode(
        decode_backend,
        q,
        k_cache,
        v_cache,
        cache_seqlens=lengths,
        cache_slot=slots,
        k_new=k_new,
        v_new=v_new,
        sink=np.zeros(4, np.float32),
        causal=True,
    )
    assert (o[[1, 3]] == 0).all() and (lse[[1, 3]] == -np.inf).all()
    assert np.isfinite(o[[0, 2]]).all()
    assert np.isnan(k_cache[[1, 3], [5, 9]]).all()


def test_a_slot_may_be_read_by_many(decode_backend):
    rng = np.random.default_rng(8)
    k_cache, v_cache = caches_of(rng, np.float32, 1, 12, lengths=[9])
    q = draw(rng, (3, 1, 2, 16), np.float32)
    check_decode(
        decode_backend,
        q,
        k_cache,
        v_cache,
        cache_seqlens=np.array([9, 4, 9], I4),
        cache_slot=np.zeros(3, I4),
    )


def test_a_row_may_read_what_lies_before_the_rows_that_another_appends(decode_backend):
    rng = np.random.default_rng(9)
    k_cache, v_cache = caches_of(rng, np.float32, 1, 12, lengths=[9])
    q = draw(rng, (2, 1, 2, 16), np.float32)
    check_decode(
        decode_backend,
        q,
        k_cache,
        v_cache,
        cache_seqlens=np.array([9, 8], I4),
        cache_slot=np.zeros(2, I4),
        seqlens_kv=np.array([1, 0]),
        k_new=draw(rng, (2, 1, 2, 16), np.float32),
        v_new=draw(rng, (2, 1, 2, 16), np.float32),
    )


# ---- rotation


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_rotation_by_hand(decode_backend, dtype, interleaved):
    """Quarter turns: exact in every dtype, and channels past rotary_dim pass through."""
    rng = np.random.default_rng(10)
    turns = np.arange(6)[:, None] + np.arange(3)[None, :]
    cos = np.array([1, 0, -1, 0])[turns % 4].astype(np.float32)
    sin = np.array([0, 1, 0, -1])[turns % 4].astype(np.float32)
    k_cache, v_cache = caches_of(rng, dtype, 1, 8, 1, (8, 8), [2])
    k_new = draw(rng, (1, 3, 1, 8), dtype)
    q = draw(rng, (1, 3, 1, 8), dtype)
    o, lse = decode(
        decode_backend,
        q,
        k_cache,
        v_cache,
        cache_seqlens=[2],
        k_new=k_new,
        v_new=k_new,
        rotary_cos=cos,
        rotary_sin=sin,
        rotary_interleaved=interleaved,
        q_positions=np.zeros((1, 3), np.int64),
    )
    for t in range(3):
        row, stored = k_new[0, t, 0].astype(np.float64), k_cache[0, 2 + t, 0].astype(np.float64)
        for pair in range(3):
            x, y = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 3)
            c, s = cos[2 + t, pair], sin[2 + t, pair]
            assert stored[x] == row[x] * c - row[y] * s
            assert stored[y] == row[x] * s + row[y] * c
        assert (stored[6:] == row[6:]).all()
    # At position 0, where these tables turn pair p by p quarters, a query is not left as it is.
    plain = decode(decode_backend, q, k_cache, v_cache, cache_seqlens=[5])
    assert not np.array_equal(plain[1], lse)
    assert np.isfinite(o.astype(np.float64)).all()


# ---- lengths


def test_queries_of_any_number_and_no_keys(decode_backend):
    rng = np.random.default_rng(11)
    k_cache, v_cache = caches_of(rng, np.float32, 3, 8, lengths=[0, 2, 8])
    q = draw(rng, (3, 5, 4, 16), np.float32)
    lengths = np.array([0, 2, 8], I4)
    o, lse = check_decode(decode_backend, q, k_cache, v_cache, cache_seqlens=lengths, causal=True)
    assert (o[0] == 0).all() and (lse[0] == -np.inf).all()  # A01, A10
    assert (lse[1, :, :3] == -np.inf).all() and np.isfinite(lse[1, :, 3:]).all()
    sink = np.array([0.5, -1, 2, 0], np.float32)
    o, lse = check_decode(
        decode_backend, q, k_cache, v_cache, cache_seqlens=lengths, causal=True, sink=sink
    )
    assert (lse[0] == sink[:, None]).all()  # A16


@pytest.mark.parametrize(
    "sizes",
    [
        dict(batch=0),
        dict(new=0),
        dict(seqlen_q=0),
        dict(heads=0),
        dict(dim_v=0),
        dict(dim_qk=0),
        dict(capacity=0, length=0, new=0),
    ],
    ids=str,
)
@pytest.mark.parametrize("paged", [False, True])
def test_zero_sizes(decode_backend, sizes, paged):
    """A10, A22; with no query at all the call still appends."""
    given_sizes = dict(
        batch=2, new=1, seqlen_q=1, heads=2, dim_qk=16, dim_v=16, capacity=8, length=5
    )
    s = {**given_sizes, **sizes}
    rng = np.random.default_rng(12)
    blocks = s["batch"] * 2
    k_cache = draw(rng, (blocks, s["capacity"], s["heads"], s["dim_qk"]), np.float32)
    v_cache = draw(rng, (blocks, s["capacity"], s["heads"], s["dim_v"]), np.float32)
    q = draw(rng, (s["batch"], s["seqlen_q"], 2 * s["heads"], s["dim_qk"]), np.float32)
    table = dict(page_table=np.arange(blocks, dtype=I4).reshape(s["batch"], 2)) if paged else {}
    check_decode(
        decode_backend,
        q,
        k_cache,
        v_cache,
        cache_seqlens=np.full(s["batch"], s["length"], I4),
        k_new=draw(rng, (s["batch"], s["new"], s["heads"], s["dim_qk"]), np.float32),
        v_new=draw(rng, (s["batch"], s["new"], s["heads"], s["dim_v"]), np.float32),
        **table,
    )


def test_packed_queries_of_mixed_lengths(decode_backend):
    """A17, A18: decodes and prefills in one call, some rows without any query."""
    rng = np.random.default_rng(13)
    k_cache, v_cache = caches_of(rng, BFLOAT16, 5, 40, 3, (64, 64), [3, 5, 0, 33, 7])
    cu = np.array([0, 1, 1, 21, 22, 22], I4)
    q = draw(rng, (24, 9, 64), BFLOAT16)
    check_decode(
        decode_backend,
        q,
        k_cache,
        v_cache,
        cache_seqlens=np.array([3, 5, 0, 33, 7], I4),
        cu_seqlens_q=cu,
        k_new=draw(rng, (24, 3, 64), BFLOAT16),
        v_new=draw(rng, (24, 3, 64), BFLOAT16),
        causal=True,
    )


# ---- shapes


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=dtype_name)
@pytest.mark.parametrize("paged", [False, True])
def test_latent_attention(decode_backend, dtype, paged):
    """MLA: 576 channels of keys, of which the first 512 are the values; one kv head."""
    rng = np.random.default_rng(14)
    cache = np.full((2, 64, 1, 576), np.nan, dtype)
    cache[0, :50], cache[1, :3] = draw(rng, (50, 1, 576), dtype), draw(rng, (3, 1, 576), dtype)
    arguments = dict(cache_seqlens=np.array([50, 3], I4), causal=True, scale=192**-0.5)
    if paged:
        pages, _, table = paged_copy(rng, cache, cache, 16)
        cache, arguments["page_table"] = pages, table
    q = draw(rng, (2, 2, 16, 576), dtype)
    values = cache[..., :512]
    k_new = draw(rng, (2, 2, 1, 576), dtype)
    o, _ = check_decode(decode_backend, q, cache, values, k_new=k_new, **arguments)
    assert o.shape == (2, 2, 16, 512)
    arguments["cache_seqlens"] = arguments["cache_seqlens"] + I4(2)
    again, _ = check_decode(decode_backend, q, cache, values, **arguments)
    compare.assert_bitwise("o", again, o)


@pytest.mark.parametrize("dim", [1, 3, 7, 8, 20, 33, 40, 72, 80, 96, 100, 112, 128, 136, 192, 256])
def test_head_dims(decode_backend, dim):
    """A23."""
    rng = np.random.default_rng(dim)
    for dim_v in {dim, 1, 64, 128}:
        for dtype in (np.float32, np.float16):
            k, v = caches_of(rng, dtype, 1, 30, 1, (dim, dim_v), [29])
            q = draw(rng, (1, 1, 3, dim), dtype)
            check_decode(decode_backend, q, k, v, cache_seqlens=np.array([29], I4))


def test_caches_of_other_layouts(decode_backend):
    """Heads before rows, keys and values in one buffer: written in place through their strides."""
    rng = np.random.default_rng(15)
    heads_first = np.full((2, 3, 20, 16), np.nan, np.float32)
    both = np.full((2, 20, 3, 2, 16), np.nan, np.float32)
    for k_cache, v_cache in (
        (heads_first.transpose(0, 2, 1, 3), heads_first.copy().transpose(0, 2, 1, 3)),
        (both[..., 0, :], both[..., 1, :]),
    ):
        k_cache[:, :7], v_cache[:, :7] = draw(rng, (2, 2, 7, 3, 16), np.float32)
        check_decode(
            decode_backend,
            draw(rng, (2, 1, 3, 16), np.float32),
            k_cache,
            v_cache,
            cache_seqlens=np.array([7, 4], I4),
            k_new=draw(rng, (2, 1, 3, 16), np.float32),
            v_new=draw(rng, (2, 1, 3, 16), np.float32),
        )


# ---- non-finite values


def test_what_no_query_reads_has_no_influence(decode_backend):
    """A39: rows beyond the length, unread pages, keys that mask, window or causality exclude."""
    rng = np.random.default_rng(16)
    length = 700
    k_cache, v_cache = caches_of(rng, np.float32, 1, 800, 2, (32, 32), [length])
    q = draw(rng, (1, 2, 4, 32), np.float32)
    mask = np.ones((1, 1, 1, length), bool)
    mask[..., 100:200] = False
    options = dict(cache_seqlens=np.array([length], I4), mask=mask, window=(650, -1), causal=True)
    wanted = check_decode(decode_backend, q, k_cache, v_cache, **options)
    k_bad, v_bad = k_cache.copy(), v_cache.copy()
    for hidden in (slice(0, 48), slice(100, 200), slice(length, 800)):
        k_bad[:, hidden], v_bad[:, hidden] = np.nan, np.inf
    assert_same_bits(decode(decode_backend, q, k_bad, v_bad, **options), wanted)


def test_nan_in_one_query_row_stays_there(decode_backend):
    rng = np.random.default_rng(17)
    k_cache, v_cache = caches_of(rng, np.float32, 2, 20, 2, (16, 16), [20, 20])
    q = draw(rng, (2, 2, 4, 16), np.float32)
    lengths = np.array([20, 20], I4)
    wanted = decode(decode_backend, q, k_cache, v_cache, cache_seqlens=lengths)
    q[0, 1, 2] = np.nan
    o, lse = decode(decode_backend, q, k_cache, v_cache, cache_seqlens=lengths)
    bad = np.zeros(o.shape[:3], bool)
    bad[0, 1, 2] = True
    assert np.isnan(o[bad]).all() and np.isnan(lse[0, 2, 1])
    compare.assert_bitwise("o", o[~bad], wanted[0][~bad])


def test_logits_without_a_finite_stand_in(decode_backend):
    """A04: a bias of finfo.min over some keys leaves them out; over all of them it is uniform."""
    rng = np.random.default_rng(18)
    k_cache, v_cache = caches_of(rng, np.float32, 1, 900, 1, (64, 64), [900])
    q = draw(rng, (1, 2, 1, 64), np.float32)
    bias = np.zeros((1, 1, 2, 900), np.float32)
    bias[..., 0, :600] = bias[..., 1, :] = np.finfo(np.float32).min
    o, _ = decode(decode_backend, q, k_cache, v_cache, cache_seqlens=np.array([900], I4), bias=bias)
    np.testing.assert_allclose(o[0, 1, 0], v_cache[0, :, 0].mean(axis=0), atol=1e-5)
    part, _ = decode(
        decode_backend, q[:, :1], k_cache[:, 600:], v_cache[:, 600:], cache_seqlens=[300]
    )
    np.testing.assert_allclose(o[0, 0], part[0, 0], atol=1e-5)


def test_hot_rows_are_one_hot(decode_backend):
    """A08: scores in the hundreds, over several parts of the keys."""
    rng = np.random.default_rng(19)
    k_cache, v_cache = caches_of(rng, np.float32, 1, 2100, 1, (32, 32), [2100])
    k_cache *= 30
    q = draw(rng, (1, 1, 2, 32), np.float32, 30.0)
    check_decode(decode_backend, q, k_cache, v_cache, cache_seqlens=np.array([2100], I4))
