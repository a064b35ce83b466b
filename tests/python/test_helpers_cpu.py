"""What only the CPU's convolution and norms can get wrong: ends of blocks of channels, of tiles and
of strips of tokens, how the work is cut, mixed dtypes, numbers of any size."""

import numpy as np
import pytest
from harness import BFLOAT16, poisoned, restrided

import onchip
from onchip.oracle import compare, linear_compare

DTYPES = [np.float64, np.float32, np.float16, BFLOAT16]
dtype_id = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
ops = onchip.ops


def exact(x):
    return x.astype(np.float64) if isinstance(x, np.ndarray) and x.dtype.kind != "i" else x


def both(name, *arrays, **options):
    """The results of cpu and, of the same numbers in float64, of the reference."""
    function = getattr(ops, name)
    got = function(*arrays, **options, backend="cpu")
    want = function(
        *map(exact, arrays), **{k: exact(v) for k, v in options.items()}, backend="reference"
    )
    return got, want


def judge_all(names, got, want, dtype, kind=linear_compare.OUTPUT):
    """By the coarser one of the call's dtype and the result's own: weights and gates have any."""
    for name, part, other in zip(names, got, want, strict=True):
        if other is None:
            assert part is None, name
        else:
            own = max(DTYPES.index(dtype), DTYPES.index(part.dtype))
            linear_compare.judge(name, part, other, DTYPES[own], kind)


def check_convolution(rng, dtype, lead, channels, width, *, state=True, sequences=None, **options):
    def draw(*shape, of=dtype):
        return rng.standard_normal(shape).astype(of)

    weight_dtype = DTYPES[rng.integers(4)]
    x, d_y = draw(*lead, channels), draw(*lead, channels)
    weight = draw(channels, width, of=weight_dtype)
    shape = (lead[0] if sequences is None else sequences, channels, width)
    if rng.random() < 0.7:
        options["bias"] = draw(channels, of=DTYPES[rng.integers(4)])
    options["activation"] = [None, "silu"][rng.integers(2)]
    if state:
        options["initial_state"] = draw(*shape)
    results = both("causal_conv1d_forward", x, weight, output_final_state=True, **options)
    judge_all(("y", "final_state"), *results, dtype)
    # The final state is a copy.
    compare.assert_bitwise("final_state", results[0][1], results[1][1].astype(dtype))
    results = both("causal_conv1d_backward", d_y, x, weight, d_final_state=draw(*shape), **options)
    judge_all(results[0]._fields, *results, dtype, linear_compare.GRADIENT)


@dtype_id
@pytest.mark.parametrize("channels", [1, 7, 16, 127, 128, 129, 300])
@pytest.mark.parametrize("width", [1, 2, 4, 5, 40])
def test_blocks_of_channels(dtype, channels, width):
    rng = np.random.default_rng(channels * 64 + width)
    check_convolution(rng, dtype, (2, 37), channels, width)


@pytest.mark.parametrize("length", [*range(10), 31, 32, 33, 36, 63, 64, 65, 96, 130])
def test_lengths_around_tiles(length):
    rng = np.random.default_rng(length)
    for width in (1, 3, 4, 6, 50):
        check_convolution(rng, np.float32, (2, length), 5, width)


@dtype_id
@pytest.mark.parametrize("case", range(12))
def test_random_convolutions(dtype, case):
    rng = np.random.default_rng(100 + case)
    channels, width = int(rng.integers(1, 40)), int(rng.integers(1, 9))
    count = int(rng.integers(1, 12))
    slots = rng.integers(0, 90, count)
    cu = np.cumsum([rng.integers(0, 4), *slots]).astype(np.int32)
    options = dict(cu_seqlens=cu, state=rng.random() < 0.5)
    if rng.random() < 0.5:
        options["seqlens"] = rng.integers(0, slots + 1).astype(np.int32)
    total = int(cu[-1]) + int(rng.integers(0, 4))
    check_convolution(rng, dtype, (total,), channels, width, sequences=count, **options)


def test_strips_of_a_long_call():
    """Rows of a batch share strips; the sums over them are those of the whole call."""
    rng = np.random.default_rng(1)
    check_convolution(rng, np.float32, (3, 3001), 9, 4)
    check_convolution(rng, np.float32, (700, 11), 9, 4)


@pytest.mark.parametrize("packed", [False, True])
def test_convolution_threads_and_memory_change_no_bit(packed):
    rng = np.random.default_rng(2)
    channels, width = 140, 4
    options = dict(activation="silu", bias=rng.standard_normal(channels).astype(np.float32))
    lead, count = (2, 500), 2
    if packed:
        lead, count = (1000,), 5
        options["cu_seqlens"] = np.array([2, 300, 300, 305, 700, 990], np.int32)
    x, d_y = rng.standard_normal((2, *lead, channels)).astype(np.float32)
    weight = rng.standard_normal((channels, width)).astype(np.float32)
    state, d_final = rng.standard_normal((2, count, channels, width)).astype(np.float32)
    threads, results = onchip.get_num_threads(), []
    try:
        for number in (1, 2, 7):
            onchip.set_num_threads(number)
            for change in (lambda array, _: array, poisoned, restrided):
                moved = [change(array, rng) for array in (x, weight)]
                own = dict(options, initial_state=change(state, rng), backend="cpu")
                result = ops.causal_conv1d_forward(*moved, output_final_state=True, **own)
                gradients = ops.causal_conv1d_backward(
                    change(d_y, rng), *moved, d_final_state=change(d_final, rng), **own
                )
                results.append((*result, *gradients))
    finally:
        onchip.set_num_threads(threads)
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            compare.assert_bitwise("result", one, two)


@dtype_id
@pytest.mark.parametrize("width", [1, 3, 4, 9])
def test_steps(dtype, width):
    """Of more sequences than a task takes, with slots skipped; equal to the whole in every bit."""
    rng = np.random.default_rng(3)
    count, channels, length = 21, 150, 6
    x = rng.standard_normal((count, length, channels)).astype(dtype)
    weight = rng.standard_normal((channels, width)).astype(np.float32)
    options = dict(activation="silu", backend="cpu")
    whole, final = ops.causal_conv1d_forward(x, weight, output_final_state=True, **options)
    pool = np.full((count + 3, channels, width), np.nan, dtype)
    slots = rng.permutation(count + 3)[:count].astype(np.int32)
    pool[slots] = 0
    skipped = rng.random(count) < 0.3
    indices = np.where(skipped, -1, slots).astype(np.int32)
    for t in range(length):
        y = ops.causal_conv1d_step(x[:, t], weight, state=pool, state_indices=indices, **options)
        compare.assert_bitwise("y", y[~skipped], whole[~skipped, t])
        assert not y[skipped].any()
    compare.assert_bitwise("pool", pool[slots[~skipped]], final[~skipped])
    assert not pool[slots[skipped]].any()
    others = np.setdiff1d(np.arange(count + 3), slots)
    assert np.isnan(pool[others].astype(np.float32)).all()


def test_a_width_beyond_the_cpu_is_the_references():
    x, weight = np.zeros((1, 3, 2), np.float32), np.zeros((2, 5000), np.float32)
    text = onchip.explain("causal_conv1d_forward", x, weight)
    assert text.startswith("causal_conv1d_forward: reference\n") and "at most 4096" in text
    with pytest.raises(onchip.Unsupported, match="width 5000"):
        ops.causal_conv1d_forward(x, weight, backend="cpu")


NORM_OPTIONS = [
    dict(),
    dict(activation="silu"),
    dict(activation="sigmoid"),
    dict(activation="silu", gate_first=True),
    dict(activation="sigmoid", gate_first=True),
]


def check_norm(rng, dtype, shape, group_size, options, change=lambda array, _: array):
    def draw(*shape, of=dtype):
        return change(rng.standard_normal(shape).astype(of), rng)

    options = dict(options, group_size=group_size)
    if "activation" in options:
        options["gate"] = draw(*shape, of=DTYPES[rng.integers(4)])
    if rng.random() < 0.7:
        options["weight"] = draw(shape[-1], of=DTYPES[rng.integers(4)])
    x, d_y = draw(*shape), draw(*shape)
    got, want = both("rms_norm_gated_forward", x, **options)
    linear_compare.judge("y", got, want, dtype)
    got, want = both("rms_norm_gated_backward", d_y, x, **options)
    judge_all(got._fields, got, want, dtype, linear_compare.GRADIENT)
    got, want = both("l2norm_forward", x)
    linear_compare.judge("y", got, want, dtype)
    got, want = both("l2norm_backward", d_y, x)
    linear_compare.judge("dx", got, want, dtype, linear_compare.GRADIENT)


@dtype_id
@pytest.mark.parametrize("options", NORM_OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("dim", "group"), [(1, 1), (3, 3), (16, 16), (30, 5), (96, 32), (257, 257), (1030, 515)]
)
def test_widths_of_norms(dtype, options, dim, group):
    check_norm(np.random.default_rng(dim), dtype, (5, dim), group, options)


@pytest.mark.parametrize("case", range(30))
def test_norms_of_any_strides(case):
    rng = np.random.default_rng(200 + case)
    shape = (*rng.integers(1, 6, rng.integers(0, 5)), int(rng.integers(1, 40)))
    change = [poisoned, restrided][case % 2]
    check_norm(rng, np.float32, shape, None, NORM_OPTIONS[case % 5], change)


def test_many_rows():
    """dweight is a sum over blocks of rows."""
    rng = np.random.default_rng(5)
    check_norm(rng, np.float32, (2, 9001, 3, 8), None, NORM_OPTIONS[1])
    check_norm(rng, np.float32, (3, 5, 3000), 1000, NORM_OPTIONS[3])


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e15, 1e30])
def test_squares_leave_no_range(size):
    """A number whose square float32 has not is normalised all the same."""
    rng = np.random.default_rng(6)
    x = (size * rng.standard_normal((4, 33))).astype(np.float32)
    for name in ("rms_norm_gated_forward", "l2norm_forward"):
        got, want = both(name, x, eps=1e-300)
        linear_compare.judge("y", got, want, np.float32)


def test_gates_far_out_keep_their_slope():
    """1 - sigmoid is computed by itself: where the gate is nearly open its slope keeps digits."""
    rng = np.random.default_rng(7)
    x, d_y = rng.standard_normal((2, 6, 40)).astype(np.float32)
    gate = (12 + rng.random(x.shape)).astype(np.float32)
    for sign in (1, -1):
        got, want = both("rms_norm_gated_backward", d_y, x, gate=sign * gate, activation="sigmoid")
        linear_compare.judge("dgate", got.dgate, want.dgate, np.float32, linear_compare.GRADIENT)


def test_numbers_that_are_not_finite_stay_in_their_group():
    rng = np.random.default_rng(8)
    x, gate, d_y = rng.standard_normal((3, 4, 30)).astype(np.float32)
    weight = rng.standard_normal(30).astype(np.float32)
    options = dict(gate=gate, weight=weight, activation="silu", group_size=5)
    clean = ops.rms_norm_gated_backward(d_y, x, **options, backend="cpu")
    clean_y = ops.rms_norm_gated_forward(x, **options, backend="cpu")
    x[1, 7] = np.nan
    weight[22] = np.inf
    y = ops.rms_norm_gated_forward(x, **options, backend="cpu")
    got = ops.rms_norm_gated_backward(d_y, x, **options, backend="cpu")
    hurt = np.zeros(x.shape, bool)
    hurt[1, 5:10] = True
    assert np.isnan(y[hurt]).all()
    assert np.isnan(got.dx[hurt]).all() and np.isnan(got.dgate[hurt]).all()
    hurt[:, 20:25] = True
    compare.assert_bitwise("y", y[:, :20][~hurt[:, :20]], clean_y[:, :20][~hurt[:, :20]])
    compare.assert_bitwise("dx", got.dx[~hurt], clean.dx[~hurt])
    others = ~hurt[1]
    others[20:25] = True  # dweight does not read the weight
    compare.assert_bitwise("dweight", got.dweight[others], clean.dweight[others])
    assert np.isnan(got.dweight[5:10]).all()
