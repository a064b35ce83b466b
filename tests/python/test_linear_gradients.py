"""Backward of the reference in float64 against central differences of the plain loop over tokens in
extended precision: every operator and variant, every input, initial and final states included."""

import numpy as np
import pytest
from linear_cases import (
    NO_MATRIX,
    VARIANTS,
    Sizes,
    Variant,
    backward,
    d_final_of,
    draw,
    draw_state,
    forward,
    output_shape,
    parts_of,
    variant_id,
)

from onchip.oracle import linear

STEP = 1e-6
EXTENDED = np.longdouble


def stabilisers_of(tensors, initial):
    """m_t of mlstm's exponential gate or of rwkv4, rows [batch, T, Hv] or [batch, T, D]."""
    if "f" in tensors:
        i, empty = tensors["i"], 0.0
        log_forget = -np.log1p(np.exp(-tensors["f"]))
    else:
        i, empty = tensors["k"], -np.inf
        log_forget = np.broadcast_to(tensors["log_decay"], i.shape)
    m = np.full((i.shape[0], i.shape[2]), empty) if initial is None else initial[2]
    rows = []
    for t in range(i.shape[1]):
        m = np.maximum(log_forget[:, t] + m, i[:, t])
        rows.append(m)
    return np.stack(rows, axis=1) if rows else np.zeros(i.shape)


def denominators_of(variant, tensors, initial, constants):
    """What mlstm divides by: of the undivided form, h over what one reads as h."""
    plain = dict(variant.options, normalize=True)
    whole, _ = linear.run("mlstm", {**tensors, **constants}, initial_state=initial, **plain)
    ones = np.ones(tensors["i"].shape)
    undivided, _ = linear.run(
        "mlstm", {**tensors, **constants, "denominators": ones}, initial_state=initial, **plain
    )
    return undivided[..., 0] / whole[..., 0]


def differences(loss, x):
    """Central differences of a scalar function, in extended precision."""
    x = x.astype(EXTENDED)
    gradient = np.zeros(x.shape)
    for index in np.ndindex(x.shape):
        centre = x[index]
        x[index] = centre + STEP
        above = loss(x)
        x[index] = centre - STEP
        below = loss(x)
        x[index] = centre
        gradient[index] = (above - below) / (2 * STEP)
    return gradient


def check(variant, *, with_initial, with_final, sizes, **options):
    rng = np.random.default_rng(7)
    tensors = draw(rng, variant, sizes)
    initial = None
    if with_initial:
        initial = draw_state(rng, variant, sizes, sizes.batch, layout=variant.layout(options))
    o, final = forward(
        "reference", variant, tensors, initial_state=initial, output_final_state=True, **options
    )
    d_o = rng.standard_normal(o.shape)
    d_final = d_final_of(rng, variant, final) if with_final else None
    got = backward(
        "reference",
        variant,
        d_o,
        tensors,
        initial_state=initial,
        d_final_state=d_final,
        **options,
    )
    constants = {}
    if variant.parts == 3:
        held = "maxima" if variant.op == "rwkv4" else "stabilisers"
        constants[held] = stabilisers_of(tensors, initial)

    def loss(changed, changed_initial):
        options_of_loss = {k: v for k, v in options.items() if k != "chunk_len"}
        result, states = linear.run(
            variant.op,
            {**tensors, **changed, **constants},
            initial_state=changed_initial,
            dtype=EXTENDED,
            **variant.options,
            **options_of_loss,
        )
        total = (result * d_o).sum()
        for state, gradient in zip(parts_of(states), parts_of(d_final), strict=False):
            if gradient is not None:
                total += (state * gradient).sum()
        return total

    for name, x in tensors.items():
        want = differences(lambda changed, name=name: loss({name: changed}, initial), x)
        gradient = getattr(got, f"d{name}")
        assert gradient.shape == x.shape and gradient.dtype == x.dtype
        np.testing.assert_allclose(gradient, want, rtol=1e-7, atol=1e-8, err_msg=f"d{name}")
    if initial is None:
        assert got.dinitial_state is None
        return
    given = parts_of(initial)
    for n, (gradient, x) in enumerate(zip(parts_of(got.dinitial_state), given, strict=True)):

        def moved(changed, n=n):
            return loss({}, (*given[:n], changed, *given[n + 1 :]))

        want = differences(moved, x)
        np.testing.assert_allclose(
            gradient, want, rtol=1e-7, atol=1e-8, err_msg=f"dinitial_state[{n}]"
        )


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
@pytest.mark.parametrize("states", ["neither", "initial", "final", "both"])
def test_backward_is_the_loops_differences(variant, states):
    check(
        variant,
        with_initial=states in ("initial", "both"),
        with_final=states in ("final", "both"),
        sizes=Sizes(length=4),
    )


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.op not in NO_MATRIX], ids=variant_id)
def test_the_other_state_layout(variant):
    other = "kv" if variant.layout({}) == "vk" else "vk"
    sizes = Sizes(batch=1, length=3)
    check(variant, with_initial=True, with_final=True, sizes=sizes, state_layout=other)


@pytest.mark.parametrize(
    "variant",
    [
        Variant("mlstm", "exp", dict(detach_normalizer=True), parts=3),
        Variant("mlstm", "exp_eps", dict(detach_normalizer=True, eps=0.3), parts=3),
        Variant(
            "mlstm",
            "sigmoid",
            dict(gate="sigmoid", normalize=True, detach_normalizer=True),
            parts=2,
        ),
    ],
    ids=variant_id,
)
def test_a_detached_denominator_is_a_constant(variant):
    rest = {k: v for k, v in variant.options.items() if k != "detach_normalizer"}
    attached = variant._replace(options=rest)
    rng = np.random.default_rng(3)
    tensors = draw(rng, variant)
    d_o = rng.standard_normal(output_shape(variant, tensors))
    detached = backward("reference", variant, d_o, tensors)
    exact = backward("reference", attached, d_o, tensors)
    assert np.abs(detached.dk - exact.dk).max() > 1e-3
    check_detached(variant)


def check_detached(variant):
    """forward takes no detach_normalizer: its value is the same."""
    rng = np.random.default_rng(11)
    sizes = Sizes(length=4)
    tensors = draw(rng, variant, sizes)
    own = {k: v for k, v in variant.options.items() if k != "detach_normalizer"}
    d_o = rng.standard_normal(output_shape(variant, tensors))
    got = backward("reference", variant, d_o, tensors)
    constants = {}
    if variant.parts == 3:
        constants["stabilisers"] = stabilisers_of(tensors, None)
    constants["denominators"] = denominators_of(
        variant._replace(options=own), tensors, None, constants
    )

    def loss(changed):
        o, _ = linear.run("mlstm", {**tensors, **changed, **constants}, dtype=EXTENDED, **own)
        return (o * d_o).sum()

    for name, x in tensors.items():
        want = differences(lambda changed, name=name: loss({name: changed}), x)
        np.testing.assert_allclose(
            getattr(got, f"d{name}"), want, rtol=1e-7, atol=1e-8, err_msg=f"d{name}"
        )
