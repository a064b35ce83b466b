"""Linear attention on every backend, operator and variant: values and gradients against the plain
loop over tokens, lengths, states, splits, steps, layouts, and what must not matter."""

import numpy as np
import pytest
from harness import poisoned, restrided
from linear_cases import (
    BACKENDS,
    DTYPES,
    SCANS,
    VARIANTS,
    Sizes,
    backward,
    calls_with,
    check_backward,
    check_forward,
    d_final_of,
    draw,
    draw_state,
    empty_state,
    every_call,
    forward,
    of_head,
    output_shape,
    parts_of,
    rows_of,
    step,
    token,
    variant_id,
    with_rows,
    with_tokens,
)

import onchip
from onchip.oracle import compare, linear_compare

LENGTHS = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 130]


def equal_bits(results, wanted):
    for name, got, want in zip(
        getattr(results, "_fields", range(len(results))), results, wanted, strict=True
    ):
        for part, other in zip(parts_of(got), parts_of(want), strict=True):
            compare.assert_bitwise(str(name), part, other)


def sliced(state, rows):
    parts = tuple(part[rows] for part in parts_of(state))
    return None if not parts else parts if isinstance(state, tuple) else parts[0]


@every_call
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_values_and_gradients(on, variant, dtype):
    rng = np.random.default_rng(1)
    sizes = Sizes(batch=2, length=37, heads_k=2, heads_v=4, dk=16, dv=24)
    tensors = draw(rng, variant, sizes, dtype)
    state = draw_state(rng, variant, sizes, 2, dtype, variant.layout({}))
    o, final = check_forward(on, variant, tensors, initial_state=state)
    d_o = rng.standard_normal(o.shape).astype(dtype)
    d_final = d_final_of(rng, variant, final)
    check_backward(on, variant, d_o, tensors, initial_state=state, d_final_state=d_final)


@every_call
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length(on, variant, length):
    rng = np.random.default_rng(length)
    sizes = Sizes(batch=1, length=length, heads_k=1, heads_v=2, dk=5, dv=3)
    tensors = draw(rng, variant, sizes, np.float32)
    state = draw_state(rng, variant, sizes, 1, np.float32, variant.layout({}))
    o, final = check_forward(on, variant, tensors, initial_state=state)
    if length == 0:
        equal_bits(parts_of(final), parts_of(state))
    d_o = rng.standard_normal(o.shape).astype(np.float32)
    d_final = d_final_of(rng, variant, final)
    got = check_backward(on, variant, d_o, tensors, initial_state=state, d_final_state=d_final)
    if length == 0:
        equal_bits(parts_of(got.dinitial_state)[:2], parts_of(d_final)[:2])
    # None and zeros are one initial state.
    zeros = empty_state(variant, state)
    equal_bits(
        forward(on, variant, tensors)[:1], forward(on, variant, tensors, initial_state=zeros)[:1]
    )
    only_state = backward(
        on, variant, np.zeros_like(d_o), tensors, initial_state=zeros, d_final_state=d_final
    )
    without = backward(on, variant, np.zeros_like(d_o), tensors, d_final_state=d_final)
    equal_bits(only_state[:-1], without[:-1])
    assert without.dinitial_state is None


@every_call
@pytest.mark.parametrize("cuts", [(1,), (5, 63), (64, 65, 69), (16, 17, 33, 50)])
def test_a_split_into_calls_is_one_call(on, variant, cuts):
    rng = np.random.default_rng(2)
    length = 70
    sizes = Sizes(batch=2, length=length, dk=4, dv=3)
    tensors = draw(rng, variant, sizes)
    state = draw_state(rng, variant, sizes, 2, layout=variant.layout({}))
    whole, final = forward(on, variant, tensors, initial_state=state, output_final_state=True)
    d_o = rng.standard_normal(whole.shape)
    d_final = d_final_of(rng, variant, final)
    wanted = backward(on, variant, d_o, tensors, initial_state=state, d_final_state=d_final)
    spans = list(zip((0, *cuts), (*cuts, length), strict=True))
    carried, outputs, initials = state, [], []
    for begin, end in spans:
        part = with_tokens(variant, tensors, begin, end)
        initials.append(carried)
        o, carried = forward(on, variant, part, initial_state=carried, output_final_state=True)
        outputs.append(o)
    np.testing.assert_allclose(np.concatenate(outputs, 1), whole, rtol=1e-11, atol=1e-12)
    for got, want in zip(parts_of(carried), parts_of(final), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12)

    pieces = {name: [] for name in tensors}
    for (begin, end), initial in reversed(list(zip(spans, initials, strict=True))):
        part = with_tokens(variant, tensors, begin, end)
        got = backward(
            on,
            variant,
            d_o[:, begin:end],
            part,
            initial_state=initial,
            d_final_state=d_final,
        )
        for name in tensors:
            pieces[name].insert(0, getattr(got, "d" + name))
        d_final = got.dinitial_state
        if variant.parts == 3:  # m is no variable between calls
            d_final = (*d_final[:2], None)
    for name in tensors:
        want = getattr(wanted, "d" + name)
        if name in rows_of(variant, tensors):
            total = np.concatenate(pieces[name], 1)
        else:
            total = sum(pieces[name])
        np.testing.assert_allclose(total, want, rtol=1e-9, atol=1e-10, err_msg=name)
    for got, want in zip(parts_of(d_final)[:2], parts_of(wanted.dinitial_state)[:2], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-10)


@every_call
def test_steps_are_forward(on, variant):
    """Token by token from a pool whose slots are in another order than the sequences."""
    rng = np.random.default_rng(3)
    sizes = Sizes(batch=3, length=9, dk=4, dv=3)
    tensors = draw(rng, variant, sizes)
    state = draw_state(rng, variant, sizes, 3, layout=variant.layout({}))
    whole, final = forward(on, variant, tensors, initial_state=state, output_final_state=True)
    indices = np.array([4, 0, 2], np.int32)
    pool = tuple(rng.standard_normal((5, *part.shape[1:])) for part in parts_of(state))
    for part, initial in zip(pool, parts_of(state), strict=True):
        part[indices] = initial
    untouched = [part[[1, 3]].copy() for part in pool]
    given = pool if isinstance(state, tuple) else pool[0]
    for t in range(sizes.length):
        one = token(variant, tensors, t)
        o = step(on, variant, one, state=given, state_indices=indices)
        np.testing.assert_allclose(o, whole[:, t], rtol=1e-11, atol=1e-12)
    for part, want, rest in zip(pool, parts_of(final), untouched, strict=True):
        np.testing.assert_allclose(part[indices], want, rtol=1e-11, atol=1e-12)
        compare.assert_bitwise("other slots", part[[1, 3]], rest)


@every_call
def test_a_step_skips_slots(on, variant):
    rng = np.random.default_rng(4)
    sizes = Sizes(batch=4, dk=4, dv=3)
    one = draw(rng, variant, sizes, np.float32, lead=(4,), is_step=True)
    pool = draw_state(rng, variant, sizes, 4, np.float32, variant.layout({}))
    before = [part.copy() for part in parts_of(pool)]
    o = step(on, variant, one, state=pool, state_indices=[2, -1, 0, -1])
    assert not o[[1, 3]].any() and o[[0, 2]].all()
    for part, old in zip(parts_of(pool), before, strict=True):
        compare.assert_bitwise("skipped", part[[1, 3]], old[[1, 3]])
        assert (part[[0, 2]] != old[[0, 2]]).any()
    compare.assert_bitwise("o", o[:1], one_row(on, variant, one, before, 0, 2))
    # Without indices, row n has slot n.
    plain = tuple(old.copy() for old in before)
    o = step(on, variant, one, state=plain if isinstance(pool, tuple) else plain[0])
    for n in range(4):
        compare.assert_bitwise("o", o[n : n + 1], one_row(on, variant, one, before, n, n))


def one_row(on, variant, tensors, pool, row, slot):
    one = with_rows(variant, tensors, lambda x: x[row : row + 1])
    state = tuple(part[slot : slot + 1].copy() for part in pool)
    return step(on, variant, one, state=state if len(state) > 1 else state[0])


@every_call
@pytest.mark.parametrize("stored", DTYPES[2:], ids=lambda d: np.dtype(d).name)
def test_a_pool_of_16_bits_is_rounded_once_a_step(on, variant, stored):
    rng = np.random.default_rng(5)
    sizes = Sizes(batch=2, dk=8, dv=4)
    one = draw(rng, variant, sizes, np.float32, lead=(2,), is_step=True)
    pool = tuple(
        part.astype(stored)
        for part in parts_of(draw_state(rng, variant, sizes, 2, layout=variant.layout({})))
    )
    wide = tuple(part.astype(np.float32) for part in pool)
    o = step(on, variant, one, state=pool if len(pool) > 1 else pool[0])
    want = step(on, variant, one, state=wide if len(wide) > 1 else wide[0])
    compare.assert_bitwise("o", o, want)
    for part, other in zip(pool, wide, strict=True):
        error = np.abs(part.astype(np.float64) - other)
        bound = 0.5 * float(compare.ml_dtypes.finfo(stored).eps) * np.abs(other) + 1e-7
        assert (error <= bound).all()


CUTS = [0, 1, 64, 64, 65, 193, 200]


@every_call
@pytest.mark.parametrize("integer", [np.int32, np.int64])
def test_packed_is_a_loop_over_sequences(on, variant, integer):
    rng = np.random.default_rng(6)
    cu = np.array([3 + cut for cut in CUTS], integer)
    count = len(CUTS) - 1
    used = np.array([1, 60, 0, 0, 128, 7], integer)
    total = int(cu[-1]) + 4
    sizes = Sizes(dk=4, dv=3)
    tensors = draw(rng, variant, sizes, lead=(total,))
    state = draw_state(rng, variant, sizes, count, layout=variant.layout({}))
    outside = np.ones(total, bool)
    for begin, length in zip(cu, used, strict=False):
        outside[begin : begin + length] = False
    outside_of = {
        name: np.repeat(outside, len(x) // total)
        for name, x in tensors.items()
        if name in rows_of(variant, tensors)
    }
    for name, rows in outside_of.items():
        tensors[name][rows] = np.nan
    lengths = dict(cu_seqlens=cu, seqlens=used)
    o, final = forward(
        on, variant, tensors, initial_state=state, output_final_state=True, **lengths
    )
    d_o = rng.standard_normal(o.shape)
    d_o[outside] = np.nan
    d_final = d_final_of(rng, variant, final)
    got = backward(on, variant, d_o, tensors, initial_state=state, d_final_state=d_final, **lengths)
    assert not o[outside].any()
    for name, rows in outside_of.items():
        assert not getattr(got, "d" + name)[rows].any()
    constants = {name: 0.0 for name in tensors if name not in rows_of(variant, tensors)}
    for n in range(count):
        begin, end = int(cu[n]), int(cu[n] + used[n])
        rows = slice(begin, end)
        alone = with_rows(
            variant, with_tokens(variant, tensors, begin, end, axis=0), lambda x: x[None]
        )
        one = slice(n, n + 1)
        want, want_final = forward(
            on,
            variant,
            alone,
            initial_state=sliced(state, one),
            output_final_state=True,
        )
        compare.assert_bitwise("o", o[rows], want[0])
        equal_bits(parts_of(sliced(final, one)), parts_of(want_final))
        given = parts_of(d_final)
        d_one = tuple(None if part is None else part[one] for part in given)
        gradients = backward(
            on,
            variant,
            d_o[None, rows],
            alone,
            initial_state=sliced(state, one),
            d_final_state=d_one if len(d_one) > 1 else d_one[0],
        )
        for name in tensors:
            gradient = getattr(gradients, "d" + name)
            if name in constants:
                constants[name] = constants[name] + gradient
            else:
                each = len(outside_of[name]) // total
                mine = getattr(got, "d" + name)[begin * each : end * each]
                compare.assert_bitwise(name, mine, gradient[0])
        equal_bits(parts_of(sliced(got.dinitial_state, one)), parts_of(gradients.dinitial_state))
    for name, wanted in constants.items():
        np.testing.assert_allclose(getattr(got, "d" + name), wanted, rtol=1e-11, atol=1e-12)


@every_call
def test_dense_sequences_may_end_early(on, variant):
    rng = np.random.default_rng(7)
    sizes = Sizes(batch=3, length=6)
    tensors = draw(rng, variant, sizes)
    used = [4, 0, 6]
    for n, length in enumerate(used):
        for name in rows_of(variant, tensors):
            each = tensors[name].shape[1] // sizes.length
            tensors[name][n, length * each :] = np.nan
    state = draw_state(rng, variant, sizes, 3, layout=variant.layout({}))
    o, final = check_forward(on, variant, tensors, initial_state=state, seqlens=used)
    d_o = rng.standard_normal(o.shape)
    got = check_backward(on, variant, d_o, tensors, initial_state=state, seqlens=used)
    for name in rows_of(variant, tensors):
        each = tensors[name].shape[1] // sizes.length
        assert not getattr(got, "d" + name)[0, 4 * each :].any()
        assert not getattr(got, "d" + name)[1].any()
    equal_bits(parts_of(sliced(final, slice(1, 2))), parts_of(sliced(state, slice(1, 2))))


@every_call
def test_grouped_heads_are_repeated_ones(on, variant):
    rng = np.random.default_rng(8)
    sizes = Sizes(batch=1, length=12, heads_k=2, heads_v=6)
    tensors = draw(rng, variant, sizes)
    grouped = [
        name for name, kind in variant.tensors().items() if kind in ("key", "key_rows", "groups")
    ]
    repeated = {
        name: np.repeat(x, 3, axis=2) if name in grouped else x for name, x in tensors.items()
    }
    o, _ = forward(on, variant, tensors)
    want, _ = forward(on, variant, repeated)
    compare.assert_bitwise("o", o, want)
    d_o = rng.standard_normal(o.shape)
    got = backward(on, variant, d_o, tensors)
    wanted = backward(on, variant, d_o, repeated)
    for name in tensors:
        ours, theirs = getattr(got, "d" + name), getattr(wanted, "d" + name)
        if name in grouped:
            theirs = theirs.reshape(*ours.shape[:2], 2, 3, -1).sum(axis=3)
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-13, err_msg=name)


@every_call
def test_heads_and_sequences_do_not_meet(on, variant):
    """Every (sequence, head) alone has the same bits; retention's decay depends on the head."""
    rng = np.random.default_rng(9)
    sizes = Sizes(batch=2, length=70, heads_k=3, heads_v=3)
    tensors = draw(rng, variant, sizes, np.float32)
    if "log_decay" in tensors and "A_log" not in tensors and tensors["log_decay"].ndim > 1:
        tensors["log_decay"][:, 20:28, 0] = -5.0
    o, _ = forward(on, variant, tensors)
    d_o = rng.standard_normal(o.shape).astype(np.float32)
    gradients = backward(on, variant, d_o, tensors)
    rows = rows_of(variant, tensors)
    for n in range(2):
        one = slice(n, n + 1)
        alone = with_rows(variant, tensors, lambda x, one=one: x[one])
        compare.assert_bitwise("o", o[one], forward(on, variant, alone)[0])
        got = backward(on, variant, d_o[one], alone)
        for name in rows:
            want = getattr(gradients, "d" + name)[one]
            compare.assert_bitwise("d" + name, getattr(got, "d" + name), want)
    if variant.op == "retention":
        return
    for h in range(3):
        kinds = variant.tensors()
        alone = {name: of_head(kinds[name], x, h, sizes) for name, x in tensors.items()}
        of_o = "width" if variant.op in SCANS else "value"
        own = of_head(of_o, o, h, sizes)
        compare.assert_bitwise("o", own, forward(on, variant, alone)[0])
        got = backward(on, variant, of_head(of_o, d_o, h, sizes), alone)
        for name in tensors:
            if kinds[name] == "one_group":  # a sum over heads
                continue
            want = of_head(kinds[name], getattr(gradients, "d" + name), h, sizes)
            compare.assert_bitwise("d" + name, getattr(got, "d" + name), want)


@every_call
def test_strides_poison_and_inputs_left_alone(on, variant):
    rng = np.random.default_rng(10)
    # Over a chunk, and with widths that are no power of two.
    sizes = Sizes(batch=2, length=70, dk=20, dv=12)
    tensors = draw(rng, variant, sizes, np.float32)
    layout = variant.layout({})
    state = draw_state(rng, variant, sizes, 2, np.float32, layout)
    o, final = forward(on, variant, tensors, initial_state=state, output_final_state=True)
    d_o = rng.standard_normal(o.shape).astype(np.float32)
    d_final = d_final_of(rng, variant, final)
    wanted = backward(on, variant, d_o, tensors, initial_state=state, d_final_state=d_final)
    for change in (poisoned, restrided):

        def changed(value, change=change):
            parts = tuple(None if p is None else change(p, rng) for p in parts_of(value))
            return parts if isinstance(value, tuple) else parts[0]

        moved = {name: change(x, rng) for name, x in tensors.items()}
        copies = {name: x.copy() for name, x in moved.items()}
        got = forward(
            on,
            variant,
            moved,
            initial_state=changed(state),
            output_final_state=True,
        )
        equal_bits((got[0], *parts_of(got[1])), (o, *parts_of(final)))
        gradients = backward(
            on,
            variant,
            change(d_o, rng),
            moved,
            initial_state=changed(state),
            d_final_state=changed(d_final),
        )
        equal_bits(gradients, wanted)
        for name, copy in copies.items():
            compare.assert_bitwise(name, moved[name], copy)


@every_call
def test_rows_that_repeat_in_memory(on, variant):
    rng = np.random.default_rng(11)
    sizes = Sizes(batch=2, length=20)
    one = draw(rng, variant, Sizes(batch=1, length=1))
    spread = with_rows(
        variant,
        one,
        lambda x: np.broadcast_to(x[:, :1], (sizes.batch, sizes.length * x.shape[1], *x.shape[2:])),
    )
    dense = {name: np.ascontiguousarray(x) for name, x in spread.items()}
    o, _ = forward(on, variant, spread)
    compare.assert_bitwise("o", o, forward(on, variant, dense)[0])
    d_o = np.broadcast_to(np.float64(1.0), o.shape)
    equal_bits(
        backward(on, variant, d_o, spread),
        backward(on, variant, np.ones(o.shape), dense),
    )


@every_call
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(batch=0),
        Sizes(length=0),
        Sizes(heads_k=0, heads_v=0),
        Sizes(heads_v=0),
        Sizes(dk=0),
        Sizes(dv=0),
    ],
    ids=str,
)
def test_zero_sizes(on, variant, sizes):
    rng = np.random.default_rng(12)
    tensors = draw(rng, variant, sizes)
    state = draw_state(rng, variant, sizes, sizes.batch, layout=variant.layout({}))
    o, final = forward(on, variant, tensors, initial_state=state, output_final_state=True)
    assert o.shape == output_shape(variant, tensors)
    assert np.isfinite(o).all()
    got = backward(
        on,
        variant,
        np.ones(o.shape),
        tensors,
        initial_state=state,
        d_final_state=d_final_of(rng, variant, final),
    )
    for name, x in tensors.items():
        gradient = getattr(got, "d" + name)
        assert gradient.shape == x.shape and np.isfinite(gradient).all()
    one = draw(rng, variant, sizes, lead=(sizes.batch,), is_step=True)
    assert step(on, variant, one, state=state).shape == (sizes.batch, *o.shape[2:])


@every_call
def test_the_future_does_not_matter(on, variant):
    rng = np.random.default_rng(13)
    sizes = Sizes(batch=1, length=40)
    tensors = draw(rng, variant, sizes, np.float32)
    o, _ = forward(on, variant, tensors)
    for at in (0, 17, 39):
        changed = {name: x.copy() for name, x in tensors.items()}
        views = with_tokens(variant, changed, at, at + 1)
        for name in rows_of(variant, tensors):
            views[name] *= np.float32(0.5)
        other, _ = forward(on, variant, changed)
        compare.assert_bitwise("before", other[:, :at], o[:, :at])
        assert (other[:, at:] != o[:, at:]).any()


@every_call
def test_kept_states_and_threads_change_no_bit(on, variant):
    rng = np.random.default_rng(14)
    sizes = Sizes(batch=2, length=75)
    tensors = draw(rng, variant, sizes, np.float32)
    d_o = rng.standard_normal(output_shape(variant, tensors)).astype(np.float32)
    wanted = backward(on, variant, d_o, tensors)
    for chunk_len in (16, 32, 160):
        equal_bits(backward(on, variant, d_o, tensors, chunk_len=chunk_len), wanted)
    o, _ = forward(on, variant, tensors)
    threads = onchip.get_num_threads()
    try:
        for count in (1, 2, 5):
            onchip.set_num_threads(count)
            equal_bits(backward(on, variant, d_o, tensors), wanted)
            compare.assert_bitwise("o", forward(on, variant, tensors)[0], o)
    finally:
        onchip.set_num_threads(threads)


@every_call
def test_the_scale_of_the_read(on, variant):
    rng = np.random.default_rng(15)
    sizes = Sizes(batch=1, length=9)
    tensors = draw(rng, variant, sizes)
    check_forward(on, variant, tensors, scale=-0.7)
    d_o = rng.standard_normal(output_shape(variant, tensors))
    check_backward(on, variant, d_o, tensors, scale=-0.7)


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_every_variant_has_a_backend(variant):
    assert any(taken is None or variant.op in taken for taken in BACKENDS.values())


def test_the_judge_refuses():
    ref = np.ones((4, 4))
    linear_compare.judge("x", ref * (1 + 1e-6), ref, np.float32)
    for wrong in (ref * 1.001, np.where(np.eye(4) > 0, np.nan, ref), ref[:3]):
        with pytest.raises(compare.Disagreement):
            linear_compare.judge("x", wrong, ref, np.float32)


@calls_with(op=("simple_gla", "gated_delta_rule", "comba", "gated_delta_product"))
def test_no_decay_is_a_decay_of_zero(on, variant):
    if "log_decay" not in variant.tensors() or "A_log" in variant.tensors():
        return
    rng = np.random.default_rng(16)
    for heads_k, heads_v in ((1, 1), (2, 4)):
        sizes = Sizes(length=70, heads_k=heads_k, heads_v=heads_v)
        tensors = draw(rng, variant, sizes)
        state = draw_state(rng, variant, sizes, sizes.batch)
        tensors["log_decay"] = np.zeros_like(tensors["log_decay"])
        without = {name: x for name, x in tensors.items() if name != "log_decay"}
        call = dict(initial_state=state, output_final_state=True)
        o, final = forward(on, variant, tensors, **call)
        equal_bits(forward(on, variant, without, **call), (o, final))
        d_o = rng.standard_normal(o.shape)
        d_final = d_final_of(rng, variant, final)
        got, want = (
            backward(on, variant, d_o, x, initial_state=state, d_final_state=d_final)
            for x in (tensors, without)
        )
        assert want.dlog_decay is None
        for name in (*without, "initial_state"):
            compare.assert_bitwise(name, getattr(got, "d" + name), getattr(want, "d" + name))
        pools = state.copy(), state.copy()
        steps = (
            step(on, variant, token(variant, x, 0), state=pool)
            for x, pool in zip((tensors, without), pools, strict=True)
        )
        compare.assert_bitwise("step", *steps)
        compare.assert_bitwise("pool", *pools)
