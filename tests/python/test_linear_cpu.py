"""What only the CPU's chunks of linear attention can get wrong: every length around them, how the
work is cut, numbers that are not finite inside a chunk."""

import numpy as np
import pytest
from linear_cases import (
    DTYPES,
    SCALAR_DECAY,
    VARIANTS,
    Sizes,
    backward,
    check_backward,
    d_final_of,
    draw,
    draw_state,
    dtype_of,
    exact,
    exact_state,
    forward,
    output_shape,
    parts_of,
    step,
    variant_id,
    with_rows,
)

import onchip
from onchip.oracle import compare, linear_compare

CHUNK = 64
TAKEN = [v for v in VARIANTS if v.op in SCALAR_DECAY]
every_variant = pytest.mark.parametrize("variant", TAKEN, ids=variant_id)


def judged_forward(variant, tensors, state, **options):
    """cpu's (o, final state), against the reference in float64."""
    dtype = dtype_of(variant, tensors)
    got = forward("cpu", variant, tensors, initial_state=state, output_final_state=True, **options)
    want = forward(
        "reference",
        variant,
        {name: exact(x) for name, x in tensors.items()},
        initial_state=exact_state(state),
        output_final_state=True,
        **options,
    )
    linear_compare.judge("o", got[0], want[0], dtype)
    for part, other in zip(parts_of(got[1]), parts_of(want[1]), strict=True):
        linear_compare.judge("final_state", part, other, dtype)
    return got


@every_variant
def test_chunks_are_the_recurrence_at_every_length(variant):
    for length in range(131):
        rng = np.random.default_rng(length)
        sizes = Sizes(batch=1, length=length, heads_k=1, heads_v=2, dk=5, dv=3)
        tensors = draw(rng, variant, sizes, np.float32)
        state = draw_state(rng, variant, sizes, 1, np.float32, variant.layout({}))
        judged_forward(variant, tensors, state)


@every_variant
def test_steps_go_on_from_chunks(variant):
    rng = np.random.default_rng(1)
    sizes = Sizes(batch=1, length=CHUNK + 20, dk=12, dv=20)
    tensors = draw(rng, variant, sizes, np.float32)
    o, final = judged_forward(variant, tensors, None)
    head = with_rows(variant, tensors, lambda x: x[:, : CHUNK + 3])
    _, state = judged_forward(variant, head, None)
    for t in range(CHUNK + 3, sizes.length):
        token = with_rows(variant, tensors, lambda x, t=t: x[:, t])
        got = step("cpu", variant, token, state=state)
        linear_compare.judge("o", got, o[:, t], np.float32)
    for part, other in zip(parts_of(state), parts_of(final), strict=True):
        linear_compare.judge("state", part, other, np.float32)


@every_variant
def test_backward_at_every_length(variant):
    for length in [*range(20), *range(60, 70), *range(124, 131)]:
        rng = np.random.default_rng(length)
        sizes = Sizes(batch=1, length=length, heads_k=1, heads_v=2, dk=5, dv=3)
        tensors = draw(rng, variant, sizes, np.float32)
        state = draw_state(rng, variant, sizes, 1, np.float32, variant.layout({}))
        d_o = rng.standard_normal(output_shape(variant, tensors)).astype(np.float32)
        d_final = d_final_of(rng, variant, state)
        check_backward("cpu", variant, d_o, tensors, initial_state=state, d_final_state=d_final)


@every_variant
@pytest.mark.parametrize("dims", [(2, 1), (16, 16), (33, 65), (128, 16), (64, 200)], ids=str)
def test_widths(variant, dims):
    rng = np.random.default_rng(2)
    for dtype in (np.float32, np.float64):
        sizes = Sizes(batch=1, length=77, heads_k=1, heads_v=3, dk=dims[0], dv=dims[1])
        tensors = draw(rng, variant, sizes, dtype)
        state = draw_state(rng, variant, sizes, 1, dtype, variant.layout({}))
        judged_forward(variant, tensors, state)
        d_o = rng.standard_normal(output_shape(variant, tensors)).astype(dtype)
        check_backward("cpu", variant, d_o, tensors, initial_state=state)


@every_variant
@pytest.mark.parametrize("lengths", [(1000,), (5, 0, 700, 64, 3, 130)], ids=str)
def test_threads_and_kept_states_change_no_bit(variant, lengths):
    """With one thread forward's chunks run in order, with many side by side."""
    rng = np.random.default_rng(3)
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    sizes = Sizes(heads_k=1, heads_v=1, dk=20, dv=12)
    tensors = draw(rng, variant, sizes, np.float32, lead=(int(cu[-1]),))
    state = draw_state(rng, variant, sizes, len(lengths), np.float32, variant.layout({}))
    d_o = rng.standard_normal(output_shape(variant, tensors)).astype(np.float32)
    d_final = d_final_of(rng, variant, state)
    results = []
    threads = onchip.get_num_threads()
    try:
        for count, chunk_len in ((1, None), (2, 64), (3, 192), (7, 16)):
            onchip.set_num_threads(count)
            o, final = judged_forward(variant, tensors, state, cu_seqlens=cu)
            gradients = backward(
                "cpu",
                variant,
                d_o,
                tensors,
                initial_state=state,
                d_final_state=d_final,
                cu_seqlens=cu,
                chunk_len=chunk_len,
            )
            flat = [part for field in gradients for part in parts_of(field)]
            results.append((o, *parts_of(final), *flat))
    finally:
        onchip.set_num_threads(threads)
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            if want is not None:
                compare.assert_bitwise("threads", got, want)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.op == "simple_gla"], ids=variant_id)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_not_finite_stays_where_the_recurrence_has_it(variant, name):
    """A weight of 0 inside a chunk must not make NaN of it."""
    rng = np.random.default_rng(4)
    sizes = Sizes(batch=1, length=150, heads_k=1, heads_v=1, dk=8, dv=8)
    for at in (0, 70, 127):
        for value in (np.inf, np.nan):
            tensors = draw(rng, variant, sizes, np.float32)
            if "log_decay" in tensors and tensors["log_decay"].ndim == 3:
                tensors["log_decay"][:, at + 9] = -np.inf
            tensors[name][0, at, 0, 3] = value
            judged_forward(variant, tensors, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("other", DTYPES, ids=lambda d: np.dtype(d).name)
def test_gates_of_another_dtype(dtype, other):
    """What is no operand of a product may have any float dtype, z included."""
    variant = next(v for v in TAKEN if v.op == "mamba2" and v.id == "full")
    rng = np.random.default_rng(5)
    sizes = Sizes(batch=1, length=70, dk=8, dv=20)
    tensors = draw(rng, variant, sizes, dtype)
    for name in ("dt", "A", "D", "z", "dt_bias"):
        tensors[name] = tensors[name].astype(other)
    judged_forward(variant, tensors, None)
    d_o = rng.standard_normal(output_shape(variant, tensors)).astype(dtype)
    got = backward("cpu", variant, d_o, tensors)
    want = backward(
        "reference", variant, exact(d_o), {name: exact(x) for name, x in tensors.items()}
    )
    loosest = max((dtype, other), key=lambda d: linear_compare.BOUNDS[np.dtype(d)][0])
    for name, x in tensors.items():
        gradient = getattr(got, "d" + name)
        assert gradient.dtype == x.dtype, name
        kind = linear_compare.kind_of_gradient(name)
        linear_compare.judge(name, gradient, getattr(want, "d" + name), loosest, kind)
