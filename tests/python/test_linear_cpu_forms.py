"""Chunks, recurrence and steps are one function on the CPU: at every length, over every split of a
sequence into calls that hand the state on, in every dtype, gradients too."""

from itertools import pairwise

import numpy as np
import pytest
from harness import BFLOAT16
from linear_cases import (
    BACKENDS,
    DTYPES,
    VARIANTS,
    Sizes,
    backward,
    d_final_of,
    draw,
    draw_state,
    exact,
    exact_state,
    forward,
    output_shape,
    parts_of,
    rows_of,
    step,
    token,
    variant_id,
    with_tokens,
)

from onchip.oracle import linear_compare

LONGEST = 130
TAKEN = [variant for variant in VARIANTS if variant.op in BACKENDS["cpu"]]
every_variant = pytest.mark.parametrize("variant", TAKEN, ids=variant_id)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)


def drawn(variant, sizes, dtype, seed):
    """Tensors, initial state, and gradients of outputs and final state. Normalised forms are judged
    away from the zeros of their denominators."""
    rng = np.random.default_rng(seed)
    positive = variant._replace(positive=variant.parts > 1)
    tensors = draw(rng, positive, sizes, dtype)
    state = draw_state(rng, positive, sizes, sizes.batch, dtype, variant.layout({}))
    d_o = rng.standard_normal(output_shape(variant, tensors)).astype(dtype)
    return tensors, state, d_o, d_final_of(rng, variant, state)


def as_given(parts):
    return parts if len(parts) > 1 else parts[0]


def in_fp64(tensors):
    return {name: exact(x) for name, x in tensors.items()}


@every_variant
def test_steps_and_chunks_agree_at_every_length(variant):
    """Of every length the outputs and the final state, against as many steps."""
    sizes = Sizes(batch=1, length=LONGEST, heads_k=1, heads_v=2, dk=5, dv=3)
    tensors, state, _, _ = drawn(variant, sizes, np.float64, 1)
    pool = as_given(tuple(part.copy() for part in parts_of(state)))
    outputs = []
    for length in range(LONGEST + 1):
        part = with_tokens(variant, tensors, 0, length)
        o, final = forward("cpu", variant, part, initial_state=state, output_final_state=True)
        if length > 0:
            outputs.append(step("cpu", variant, token(variant, tensors, length - 1), state=pool))
            np.testing.assert_allclose(o, np.stack(outputs, 1), rtol=1e-10, atol=1e-11)
        for got, want in zip(parts_of(final), parts_of(pool), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-11)


@every_variant
def test_gradients_at_every_length(variant):
    for length in range(LONGEST + 1):
        sizes = Sizes(batch=1, length=length, heads_k=1, heads_v=2, dk=5, dv=3)
        tensors, state, d_o, d_final = drawn(variant, sizes, np.float64, length)
        given = dict(initial_state=state, d_final_state=d_final)
        got = backward("cpu", variant, d_o, tensors, **given)
        want = backward("reference", variant, d_o, tensors, **given)
        linear_compare.judge_gradients(got, want, tensors, np.float64)


@every_variant
@every_dtype
def test_random_splits_hand_states_and_gradients_on(variant, dtype):
    """Single tokens among the parts: those run as steps do."""
    sizes = Sizes(batch=2, length=200, heads_k=1, heads_v=2, dk=16, dv=16)
    tensors, state, d_o, d_final = drawn(variant, sizes, dtype, 2)
    precise = dict(initial_state=exact_state(state))
    wide = in_fp64(tensors)
    want = forward("reference", variant, wide, output_final_state=True, **precise)
    wanted = backward(
        "reference", variant, exact(d_o), wide, d_final_state=exact_state(d_final), **precise
    )
    rng = np.random.default_rng(3)
    for count in (1, 5):
        inner = np.sort(rng.choice(np.arange(1, sizes.length - 1), count, replace=False))
        spans = list(pairwise([0, *inner, sizes.length - 1, sizes.length]))
        carried, initials, outputs = state, [], []
        for begin, end in spans:
            initials.append(carried)
            part = with_tokens(variant, tensors, begin, end)
            o, carried = forward(
                "cpu", variant, part, initial_state=carried, output_final_state=True
            )
            outputs.append(o)
        linear_compare.judge("o", np.concatenate(outputs, 1), want[0], dtype)
        for part, other in zip(parts_of(carried), parts_of(want[1]), strict=True):
            linear_compare.judge("final_state", part, other, dtype)
        pieces = {name: [] for name in tensors}
        d_carried = d_final
        for (begin, end), initial in reversed(list(zip(spans, initials, strict=True))):
            part = with_tokens(variant, tensors, begin, end)
            got = backward(
                *("cpu", variant, d_o[:, begin:end], part),
                initial_state=initial,
                d_final_state=d_carried,
            )
            for name in tensors:
                pieces[name].insert(0, getattr(got, "d" + name))
            d_carried = got.dinitial_state
            if variant.parts == 3:  # m is no variable between calls
                d_carried = (*d_carried[:2], None)
        rows = rows_of(variant, tensors)
        gradients = {
            name: np.concatenate(parts, 1) if name in rows else sum(map(exact, parts)).astype(dtype)
            for name, parts in pieces.items()
        }
        got = wanted._replace(
            **{"d" + name: x for name, x in gradients.items()}, dinitial_state=d_carried
        )
        if variant.parts == 3:
            # d(m_0) of one call counts what the calls' boundaries drop: it has no bound here.
            got = got._replace(dinitial_state=(*d_carried[:2], wanted.dinitial_state[2]))
        linear_compare.judge_gradients(got, wanted, tensors, dtype)


@every_variant
@every_dtype
@pytest.mark.parametrize("length", [1, 8, 65])
def test_gradients_of_the_initial_state(variant, dtype, length):
    """Of a loss on the outputs, on the final state, on both; a state of fp32 beside 16-bit rows."""
    sizes = Sizes(batch=2, length=length, heads_k=1, heads_v=2, dk=16, dv=16)
    tensors, state, d_o, d_final = drawn(variant, sizes, dtype, 4)
    zeros = as_given(tuple(np.zeros_like(part) for part in parts_of(state)))
    for initial in (state, zeros):
        if variant.parts > 1 and initial is zeros and length == 1:
            continue  # the quotient of one token's sums does not depend on what made them
        for from_outputs, from_state in ((True, False), (False, True), (True, True)):
            read = d_o if from_outputs else np.zeros_like(d_o)
            d_state = d_final if from_state else None
            got = backward(
                "cpu", variant, read, tensors, initial_state=initial, d_final_state=d_state
            )
            want = backward(
                *("reference", variant, exact(read), in_fp64(tensors)),
                initial_state=exact_state(initial),
                d_final_state=exact_state(d_state),
            )
            for part, other in zip(
                parts_of(got.dinitial_state), parts_of(want.dinitial_state), strict=True
            ):
                assert part.dtype == (np.float64 if dtype == np.float64 else np.float32)
                linear_compare.judge("dinitial_state", part, other, dtype, linear_compare.GRADIENT)


@every_variant
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=lambda d: np.dtype(d).name)
def test_gradients_of_long_sequences(variant, dtype):
    """Over more chunks than one, constants that are summed over all of them included."""
    sizes = Sizes(batch=2, length=300, heads_k=2, heads_v=4, dk=16, dv=16)
    tensors, state, d_o, d_final = drawn(variant, sizes, dtype, 5)
    got = backward("cpu", variant, d_o, tensors, initial_state=state, d_final_state=d_final)
    want = backward(
        *("reference", variant, exact(d_o), in_fp64(tensors)),
        initial_state=exact_state(state),
        d_final_state=exact_state(d_final),
    )
    linear_compare.judge_gradients(got, want, tensors, dtype)
