"""src/gpu/tile on a Hopper GPU, primitive by primitive against plain loops; without one, only that
everything compiles."""

import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools/gpu"))

import driver
import nvrtc
import resources

TEXT = (Path(__file__).parent / "tile_kernels.cuh").read_text()
SHARED_BYTES = 3 * 64 * 128 * 2


@pytest.fixture(scope="module")
def cubin():
    image, log = nvrtc.compile_text(TEXT, "tile_kernels.cuh")
    assert image is not None, log
    assert resources.warnings(log) == []
    return image


@pytest.fixture
def run(cubin):
    try:
        driver.use_device((9, 0))
    except driver.NoDevice as reason:
        pytest.skip(str(reason))

    def launch(name, *arguments, threads=128, blocks=1):
        """NumPy arrays become device buffers; returns their contents afterwards, in order."""
        kernel = driver.Kernel(cubin, name, SHARED_BYTES)
        buffers, values = [], []
        for a in arguments:
            if isinstance(a, np.ndarray):
                a = driver.Buffer(a)
            if isinstance(a, driver.Buffer):
                buffers.append(a)
                values.append(ctypes.c_uint64(a.address))
            elif isinstance(a, float):
                values.append(ctypes.c_float(a))
            elif isinstance(a, int):
                values.append(ctypes.c_int(a))
            else:
                values.append(a)
        kernel.launch(blocks, threads, values, 0)
        return [b.read() for b in buffers]

    return launch


def bf16_bits(x):
    """Round to nearest even; finite values."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def fragment_element(thread, step, register, half):
    """(row, column) of half a register of the A operand; PTX manual, wgmma m64k16."""
    row = thread // 32 * 16 + thread % 32 // 4 + register % 2 * 8
    return row, step * 16 + register // 2 * 8 + thread % 4 * 2 + half


def test_compiles(cubin):
    assert cubin


ROWS, COLUMNS, HEADS = 100, 128, 3


def coordinates(*values):
    return (ctypes.c_int * 5)(*values)


def tensor_map(buffer, ragged=False):
    """[rows][heads][columns], axes column, row, head, 1, end."""
    row_bytes = HEADS * COLUMNS * 2
    address, ends = buffer.address, 1
    if ragged:
        address, ends = address - ROWS * row_bytes, ROWS + 1
    return driver.tensor_map(
        driver.DTYPE_FLOAT16,
        address,
        (COLUMNS, ROWS, HEADS, 1, ends),
        (row_bytes, COLUMNS * 2, 16, row_bytes if ragged else 16),
        (64, 64, 1, 1, 1),
    )


def numbered():
    return np.arange(ROWS * HEADS * COLUMNS, dtype=np.uint16).reshape(ROWS, HEADS, COLUMNS)


@pytest.mark.parametrize("row", [0, 17, 60, 99, 100, -10, -64])
def test_tma_load_and_swizzle(run, row):
    tensor = driver_buffer(run, numbered())
    out = np.full((64, 128), 0xDEAD, np.uint16)
    (got,) = run("tma_load_box", tensor_map(tensor), coordinates(0, row, 1, 0, 0), out)
    want = np.zeros((64, 128), np.uint16)
    for r in range(64):
        if 0 <= row + r < ROWS:
            want[r] = numbered()[row + r, 1]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("begin", "length", "row"),
    [(0, 100, 0), (20, 50, 0), (20, 50, 40), (99, 1, 0), (37, 63, 10)],
)
def test_tma_load_stops_at_the_end_of_a_sequence(run, begin, length, row):
    tensor = driver_buffer(run, numbered())
    out = np.full((64, 128), 0xDEAD, np.uint16)
    at = coordinates(0, ROWS - length + row, 2, 0, begin + length)
    (got,) = run("tma_load_box", tensor_map(tensor, ragged=True), at, out)
    want = np.zeros((64, 128), np.uint16)
    for r in range(64):
        if row + r < length:
            want[r] = numbered()[begin + row + r, 2]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("begin", "length", "row"), [(0, 100, 0), (20, 50, 0), (20, 50, 40), (99, 1, 0)]
)
def test_tma_store_stops_at_the_end_of_a_sequence(run, begin, length, row):
    tensor = driver_buffer(run, np.full((ROWS, HEADS, COLUMNS), 7, np.uint16))
    tile = np.arange(64 * 128, dtype=np.uint16).reshape(64, 128)
    at = coordinates(0, ROWS - length + row, 1, 0, begin + length)
    run("tma_store_box", tensor_map(tensor, ragged=True), at, tile)
    want = np.full((ROWS, HEADS, COLUMNS), 7, np.uint16)
    for r in range(64):
        if row + r < length:
            want[begin + row + r, 1] = tile[r]
    np.testing.assert_array_equal(tensor.read(), want)


def driver_buffer(_run, array):
    """A buffer that outlives one launch; asking for `run` first makes the context current."""
    return driver.Buffer(array)


def test_fragments_exhaustive(run):
    matrix = np.arange(64 * 128, dtype=np.uint16).reshape(64, 128)
    fragments = np.zeros((128, 8, 4), np.uint32)
    for t in range(128):
        for k in range(8):
            for i in range(4):
                low, high = (int(matrix[fragment_element(t, k, i, h)]) for h in (0, 1))
                fragments[t, k, i] = low | high << 16
    _, loaded = run("load_fragments_of", matrix, np.zeros_like(fragments))
    np.testing.assert_array_equal(loaded, fragments)
    _, stored = run("store_fragments_to", fragments, np.zeros_like(matrix))
    np.testing.assert_array_equal(stored, matrix)


def test_accumulator_is_an_operand(run):
    (got,) = run("accumulator_round_trip", np.zeros((64, 128), np.float16))
    rows, columns = np.indices((64, 128))
    np.testing.assert_array_equal(got, (rows * 16 + columns // 8).astype(np.float16))


@pytest.mark.parametrize("live", [0, 1, 13, 64])
def test_accumulator_rows_without_keys_become_zeros(run, live):
    out = np.full((64, 128), np.nan, np.float16)
    got, negated = run("accumulator_to_matrix", live, out, out)
    want = np.repeat(np.arange(64, dtype=np.float16)[:, None], 128, 1)
    want[:, 3] = np.nan
    want[live:] = 0
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(negated, -want)
    assert np.signbit(negated[live:]).all()


def test_pack_rounds_to_nearest_even(run):
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(100_000) * 10.0 ** rng.uniform(-6, 3.5, 100_000)).astype(np.float32)
    x[:8] = [0.0, -0.0, 1.0, 1.00390625, 1.01171875, 65504.0, 6e-8, -1.00390625]
    empty = np.zeros(50_000, np.uint32)
    _, as_bf16, as_fp16 = run("pack_pairs", x, empty, empty, 50_000, threads=256, blocks=200)
    np.testing.assert_array_equal(as_bf16.view(np.uint16), bf16_bits(x))
    np.testing.assert_array_equal(as_fp16.view(np.uint16), x.astype(np.float16).view(np.uint16))


@pytest.mark.parametrize("how", ["ss", "rs", "rs_mn"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("n", [64, 128])
@pytest.mark.parametrize("steps", [4, 8])
def test_wgmma(run, steps, n, dtype, how):
    """Small integers, so that every sum is exact."""
    rng = np.random.default_rng(2)
    a = rng.integers(-8, 9, (64, 128)).astype(np.float32)
    b = rng.integers(-8, 9, (128, n)).astype(np.float32)

    def bits(x):
        x = np.ascontiguousarray(x)
        return bf16_bits(x) if dtype == "bf16" else x.astype(np.float16).view(np.uint16)

    given = b if how == "rs_mn" else b.T
    out = np.full((64, n), np.nan, np.float32)
    *_, got = run(f"multiply_{n}_{dtype}_{steps}_{how}", bits(a), bits(given), out)
    np.testing.assert_array_equal(got, 2 * (a @ b))


def test_mbarrier(run):
    (seen,) = run("mbarrier_phases", np.zeros(7, np.int32))
    assert seen.tolist() == [1] * 7


def test_named_barrier(run):
    (order,) = run("named_barrier_turns", np.full(150, -1, np.int32), threads=384)
    assert order.tolist() == [0, 1, 2] * 50


@pytest.mark.parametrize("spread", [0.1, 3.0, 100.0])
@pytest.mark.parametrize("masked", [0b00001, 0b11111, 0b00011])
@pytest.mark.parametrize("kernel", ["online_softmax_of", "online_softmax_by_vote"])
def test_online_softmax(run, spread, masked, kernel):
    rng = np.random.default_rng(3)
    blocks, c = 5, 0.18
    scores = (rng.standard_normal((blocks, 64, 64)) * spread).astype(np.float32)
    scores += np.linspace(0, 20 * spread, blocks, dtype=np.float32)[:, None, None]
    limits = rng.integers(0, 65, (blocks, 64)).astype(np.int32)
    limits[:, 5] = 0  # a row without keys as long as blocks are masked
    seen = scores.astype(np.float64)
    for b in range(blocks):
        if masked >> b & 1:
            seen[b][np.arange(64)[None, :] >= limits[b][:, None]] = -np.inf
            # What is excluded has no influence.
            scores[b][np.arange(64)[None, :] >= limits[b][:, None]] = np.nan
    rows = np.zeros(64, np.float32)
    out = run(
        kernel,
        scores,
        limits,
        blocks,
        masked,
        float(c),
        np.zeros_like(scores),
        rows,
        rows,
        rows,
    )
    probabilities, o, maximum, total = out[2:]
    flat = seen.transpose(1, 0, 2).reshape(64, -1)
    with np.errstate(invalid="ignore", divide="ignore"):
        lse = np.log2(np.exp2(c * (flat - flat.max(1, keepdims=True))).sum(1)) + c * flat.max(1)
        got = np.where(total == 0, -np.inf, maximum.astype(np.float64) * c + np.log2(total))
    empty = np.isneginf(flat.max(1))
    np.testing.assert_array_equal(np.isneginf(got), empty)
    np.testing.assert_allclose(got[~empty], lse[~empty], rtol=1e-5, atol=1e-5)
    # The last block is relative to the final maximum, which lags by at most 2^8.
    live = ~np.isneginf(maximum)
    want = np.exp2(c * (seen[-1] - np.where(live, maximum, 0)[:, None].astype(np.float64)))
    np.testing.assert_allclose(probabilities[-1], want, rtol=2e-4 * max(1, spread / 10), atol=1e-6)
    assert probabilities.max() <= 2.0**8 * 1.001
    # o followed the maximum from the first block's to the last's.
    first = seen[0].max(1)
    moved = live & ~np.isneginf(first)
    np.testing.assert_allclose(
        o[moved], np.exp2(c * (first[moved] - maximum[moved])), rtol=1e-3, atol=1e-30
    )
    assert (o[live & np.isneginf(first)] == 0).all()


class DenseBatch(ctypes.Structure):
    _fields_ = [
        ("seqlen_q", ctypes.c_int),
        ("seqlen_kv", ctypes.c_int),
        ("heads", ctypes.c_int),
        ("tiles_per_head", ctypes.c_int),
        ("late_tiles", ctypes.c_int),
        ("heads_per_section", ctypes.c_int),
        ("num_tiles", ctypes.c_int),
    ]


class UsedLengths(ctypes.Structure):
    _fields_ = [
        ("q", ctypes.c_uint64),
        ("kv", ctypes.c_uint64),
        ("q_int64", ctypes.c_bool),
        ("kv_int64", ctypes.c_bool),
    ]


@pytest.mark.parametrize("late", [0, 1, 3])
@pytest.mark.parametrize("heads_per_section", [1, 4, 6])
def test_dense_tiles(run, heads_per_section, late):
    batch, heads, tiles = 5, 3, 7
    lengths = np.array([100, -4, 1000, 7, 5000], np.int64)
    buffer = driver_buffer(run, lengths)
    given = DenseBatch(800, 1000, heads, tiles, late, heads_per_section, 15 * tiles)
    used = UsedLengths(0, buffer.address, False, True)
    order = []  # (tile, batch and head)
    for first in range(0, batch * heads, heads_per_section):
        section = range(first, min(first + heads_per_section, batch * heads))
        order += [(tile, h) for tile in reversed(range(late, tiles)) for h in section]
    order += [(tile, h) for tile in reversed(range(late)) for h in range(batch * heads)]
    want = [
        [h // heads, h % heads, tile, 800, 800, min(max(lengths[h // heads], 0), 1000)]
        for tile, h in order
    ]
    count = len(want) + 2
    (got,) = run("dense_tiles", given, used, count, np.zeros((count, 6), np.int32), blocks=2)
    assert got[:-2].tolist() == want
    assert got[-2:, 0].tolist() == [-1, -1]


@pytest.mark.parametrize("blocks", [1, 2, 132, 500])
def test_work_counter(run, blocks):
    """In memory that holds anything: noise, what others left half done, its own leavings."""
    rng = np.random.default_rng(5)
    pieces, launch = 1000, int(rng.integers(2**61)) * 2
    memory = rng.integers(-(2**63), 2**63 - 1, 2)
    for other in (None, 0, launch + 2, launch + 3, launch - 1):
        if other is not None:
            memory[0] = other
        counter = driver_buffer(run, memory)
        for repeat in range(1, 4):
            taken = driver_buffer(run, np.zeros(pieces, np.int32))
            run("share_work", counter, ctypes.c_uint64(launch), pieces, taken, blocks=blocks)
            assert (taken.read() == 1).all()
            assert counter.read()[0] == 0, repeat


def parts_of_tiles(rng, n, parts):
    """[tile][part][n + 4][thread]: accumulators, then maxima and sums of a thread's two rows. Some
    parts of a row have seen no key; in the first tile, rows of threads 0 to 31 have none at all."""
    given = rng.standard_normal((SPLIT_TILES, parts, n + 4, 128)).astype(np.float32)
    maxima, sums = given[:, :, n : n + 2], given[:, :, n + 2 :]
    maxima *= 40
    sums[...] = rng.uniform(0.5, 200, sums.shape)
    if parts > 1:
        maxima[rng.random(maxima.shape) < 0.3] = -np.inf
    maxima[0, :, :, :32] = -np.inf
    return given


def combined(given, n, c):
    """In double precision; and the sum of what is added up, each without its sign."""
    o, maxima, sums = np.split(given.astype(np.float64), (n, n + 2), axis=2)
    top = maxima.max(1, keepdims=True)
    with np.errstate(invalid="ignore"):  # -inf - -inf, which is not looked at
        factor = np.where(maxima == -np.inf, 0, np.exp2((maxima - top) * c))
    of_element = factor[:, :, np.arange(n) // 2 % 2]
    made = [(of_element * o).sum(1), top[:, 0], (factor * sums).sum(1)]
    size = [(of_element * abs(o)).sum(1), np.zeros_like(top[:, 0]), (factor * sums).sum(1)]
    return np.concatenate(made, 1), np.concatenate(size, 1)


SPLIT_TILES = 3


@pytest.mark.parametrize("n", [32, 64])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_parts_of_a_tile(run, parts, n):
    """Whoever comes last, the bits are the same: those of the parts added up in their order. The
    words that are counted in hold anything, also what the same launch has left in them."""
    rng = np.random.default_rng(7)
    c = np.float32(0.18)
    given = parts_of_tiles(rng, n, parts)
    wanted, size = combined(given, n, float(c))
    in_buffer = driver_buffer(run, given)
    count = SPLIT_TILES * parts
    first = None
    for launch in (int(rng.integers(2**62)) * 2, 0, 2**64 - 2):
        for before in (0x123456789ABCDEF, launch - 1, launch + parts, launch + parts + 1):
            word = np.uint64(before % 2**64)
            arrived = driver_buffer(run, np.full(SPLIT_TILES, word, np.uint64))
            slots = driver_buffer(run, np.full_like(given, np.nan))
            for order in (np.arange(count), np.arange(count)[::-1], rng.permutation(count)):
                *_, out, last = run(
                    f"combine_parts_of_{n}",
                    order.astype(np.int32),
                    parts,
                    ctypes.c_uint64(launch),
                    float(c),
                    in_buffer,
                    slots,
                    arrived,
                    np.full_like(given[:, 0], np.nan),
                    np.zeros(SPLIT_TILES, np.int32),
                    blocks=count,
                )
                assert last.tolist() == [1] * SPLIT_TILES
                assert (arrived.read() == np.uint64((launch + parts) % 2**64)).all()
                first = out if first is None else first
                np.testing.assert_array_equal(out.view(np.uint32), first.view(np.uint32))
    np.testing.assert_array_equal(first[:, n : n + 2], wanted[:, n : n + 2])
    added = [*range(n), n + 2, n + 3]
    error = abs(first[:, added].astype(np.float64) - wanted[:, added])
    assert (error <= 5e-6 * size[:, added]).all()
    assert (first[0][added, :32] == 0).all()
    if parts == 1:  # unchanged
        live = given[:, 0, n : n + 2] != -np.inf
        for i in range(n):
            same = first[:, i] == given[:, 0, i]
            assert same[live[:, i // 2 % 2]].all()
        assert (first[:, n + 2 :] == given[:, 0, n + 2 :])[live].all()


class PackedBatch(ctypes.Structure):
    _fields_ = [
        ("cu_seqlens_q", ctypes.c_uint64),
        ("cu_seqlens_kv", ctypes.c_uint64),
        ("q_int64", ctypes.c_bool),
        ("kv_int64", ctypes.c_bool),
        ("num_seqs", ctypes.c_int),
        ("total_q", ctypes.c_int),
        ("total_kv", ctypes.c_int),
        ("heads", ctypes.c_int),
    ]


@pytest.mark.parametrize("kind", ["even", "ragged", "none", "descending", "outside"])
@pytest.mark.parametrize("step", [1, 3, 37])
def test_packed_tiles(run, kind, step):
    rng = np.random.default_rng(4)
    total_q, total_kv, heads = 20_000, 15_000, 3
    if kind == "even":
        q, kv = np.arange(11) * 2000, np.arange(11) * 1500
    elif kind == "none":
        q = kv = np.zeros(1, np.int64)
    else:
        q, kv = rng.integers(0, 20_000, 101), rng.integers(0, 15_000, 101)
        if kind != "descending":
            q, kv = np.sort(q), np.sort(kv)
        if kind == "outside":
            q, kv = q * 3 - 5000, kv * 2**33
    q, kv = q.astype(np.int32), kv.astype(np.int64)

    def clamp(x, total):
        return np.minimum(np.maximum.accumulate(np.maximum(x.astype(np.int64), 0)), total)

    q_ends = [*clamp(q, total_q), total_q]
    kv_ends = [*clamp(kv, total_kv), total_kv]
    tiles = []
    q0 = kv0 = 0
    for slot, (q1, kv1) in enumerate(zip(q_ends, kv_ends, strict=True)):
        count = -(-(q1 - q0) // 128) * heads
        tiles += [(slot, rest, q0, q1 - q0, kv0, kv1 - kv0) for rest in range(count)]
        q0, kv0 = q1, kv1
    count = len(tiles) // step + 3
    q_buffer, kv_buffer = driver_buffer(run, q), driver_buffer(run, kv)
    batch = PackedBatch(
        q_buffer.address, kv_buffer.address, False, True, len(q) - 1, total_q, total_kv, heads
    )
    (got,) = run("packed_tiles", batch, step, count, np.zeros((count, 6), np.int32), threads=32)
    for i in range(count):
        if i * step < len(tiles):
            assert tuple(got[i]) == tiles[i * step], i
        else:
            assert got[i][0] == -1


@pytest.mark.parametrize("size", [0, 16, 64, 2048, 4080])
def test_zero_shared(run, size):
    (got,) = run("zero_of", size, np.full(1024, 9, np.uint32))
    want = np.full(1024, 7, np.uint32)
    want[4 : 4 + size // 4] = 0
    np.testing.assert_array_equal(got, want)


def test_small_instructions(run):
    x = np.concatenate([np.linspace(-140, 120, 5000), [-np.inf, 0.0]]).astype(np.float32)
    _, exponentials, logarithms, elected = run(
        "small_instructions", x, np.zeros_like(x), np.zeros_like(x), np.zeros(2, np.int32), len(x)
    )
    np.testing.assert_allclose(exponentials, np.exp2(x.astype(np.float64)), rtol=3e-7, atol=2e-38)
    positive = x > 0
    np.testing.assert_allclose(logarithms[positive], np.log2(x[positive]), rtol=1e-6, atol=1e-6)
    assert logarithms[-1] == -np.inf
    assert elected.tolist() == [4, 0]
