"""The scans hgrn, mamba1 and rwkv4 beside closed forms of their papers, with decays and exponents
at their ends, and beside the operators that they are special cases of."""

import numpy as np
import pytest
from linear_cases import (
    DTYPES,
    SCANS,
    VARIANTS,
    Sizes,
    backward,
    calls_with,
    check_backward,
    check_forward,
    draw,
    draw_state,
    empty_state,
    forward,
    parts_of,
    rows_of,
    step,
    token,
)

import onchip
from onchip.oracle import compare

every_scan = calls_with(op=SCANS)
SIZES = Sizes(batch=2, length=40, heads_k=2, heads_v=4, dk=6, dv=3)
MAMBA1 = next(v for v in VARIANTS if v.op == "mamba1" and v.id == "full")


def assert_finite_gradients(got, tensors):
    for name in tensors:
        assert np.isfinite(getattr(got, "d" + name).astype(np.float64)).all(), name


# ---- closed forms, each token's output as a sum over all before it ------------------------------


def hgrn_of_the_paper(x, log_decay):
    """Qin et al. 2023: o_t = sum_{i <= t} (prod_{i < j <= t} f_j) x_i."""
    total = np.cumsum(log_decay, axis=1)
    o = np.zeros_like(x)
    for t in range(x.shape[1]):
        o[:, t] = (np.exp(total[:, t : t + 1] - total[:, : t + 1]) * x[:, : t + 1]).sum(1)
    return o


def mamba1_of_the_paper(u, delta, A, B, C, D, z, delta_bias):
    """Gu & Dao 2023: y_t = sum_{i <= t} C_t exp(A sum_{i < j <= t} delta_j) delta_i B_i u_i, then
    + D u_t, gated by silu(z_t)."""
    delta = np.log1p(np.exp(delta + delta_bias))
    total = np.cumsum(delta, axis=1)
    each = u.shape[2] // B.shape[2]
    B, C = np.repeat(B, each, axis=2), np.repeat(C, each, axis=2)
    y = np.zeros_like(u)
    for t in range(u.shape[1]):
        passed = total[:, t : t + 1] - total[:, : t + 1]
        decay = np.exp(passed[..., None] * A)
        written = (delta * u)[:, : t + 1, :, None] * B[:, : t + 1]
        y[:, t] = (C[:, t, None] * decay * written).sum((1, 3)) + D * u[:, t]
    return y * z / (1 + np.exp(-z))


def rwkv4_of_the_paper(k, v, log_decay, u):
    """Peng et al. 2023, equation 14: sums over i < t of e^(-(t - 1 - i) w + k_i), and e^(u + k_t)
    for the token itself."""
    o = np.zeros_like(v)
    for t in range(k.shape[1]):
        age = (t - 1 - np.arange(t))[None, :, None]
        weights = np.concatenate(
            [np.exp(age * log_decay + k[:, :t]), np.exp(u + k[:, t : t + 1])], axis=1
        )
        o[:, t] = (weights * v[:, : t + 1]).sum(1) / weights.sum(1)
    return o


@calls_with(op=("hgrn", "rwkv4"))
def test_equals_the_paper_as_a_sum(on, variant):
    tensors = draw(np.random.default_rng(1), variant, SIZES)
    o, _ = forward(on, variant, tensors)
    paper = {"hgrn": hgrn_of_the_paper, "rwkv4": rwkv4_of_the_paper}[variant.op]
    np.testing.assert_allclose(o, paper(**tensors), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("on", ["reference"])
def test_mamba1_equals_the_paper_as_a_sum(on):
    tensors = draw(np.random.default_rng(2), MAMBA1, SIZES)
    o, _ = forward(on, MAMBA1, tensors)
    np.testing.assert_allclose(o, mamba1_of_the_paper(**tensors), rtol=1e-11, atol=1e-12)


# ---- as special cases ---------------------------------------------------------------------------


def test_hgrn_is_gla_of_one_number():
    """A head a channel, q = k = 1."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, 30, 5))
    g = -rng.random(x.shape)
    ones = np.ones((2, 30, 5, 1))
    o, final = onchip.ops.hgrn_forward(x, g, output_final_state=True)
    want, want_final = onchip.ops.gla_forward(
        ones, ones, x[..., None], g[..., None], output_final_state=True
    )
    np.testing.assert_allclose(o, want[..., 0], rtol=1e-13)
    np.testing.assert_allclose(final, want_final[..., 0, 0], rtol=1e-13)


def test_mamba1_of_one_rate_a_channel_is_mamba2():
    """Of heads of width 1, gradients included."""
    rng = np.random.default_rng(4)
    tensors = draw(rng, MAMBA1, SIZES)
    rate = tensors["A"][:, 0].copy()
    tensors["A"] = np.repeat(rate[:, None], SIZES.dk, axis=1)
    o, final = forward("reference", MAMBA1, tensors, output_final_state=True)
    names = {"u": "x", "delta": "dt", "delta_bias": "dt_bias"}
    wide = {names.get(name, name): x for name, x in tensors.items()} | dict(A=rate)
    wide |= {name: wide[name][..., None] for name in ("x", "z")}
    want, want_final = onchip.ops.mamba2_forward(
        **wide, output_final_state=True, backend="reference"
    )
    np.testing.assert_allclose(o, want[..., 0], rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(final, want_final[:, :, 0], rtol=1e-11, atol=1e-13)
    d_o = rng.standard_normal(o.shape)
    got = backward("reference", MAMBA1, d_o, tensors)
    wanted = onchip.ops.mamba2_backward(d_o[..., None], **wide, backend="reference")
    np.testing.assert_allclose(got.dA.sum(1), wanted.dA, rtol=1e-11)
    for ours, theirs in (("delta", "dt"), ("B", "B"), ("C", "C"), ("D", "D")):
        np.testing.assert_allclose(
            getattr(got, "d" + ours), getattr(wanted, "d" + theirs), rtol=1e-11, atol=1e-13
        )


def test_a_group_for_all_needs_no_axis():
    rng = np.random.default_rng(5)
    tensors = draw(rng, MAMBA1, SIZES._replace(heads_k=1))
    flat = tensors | {name: tensors[name][:, :, 0] for name in "BC"}
    o, _ = forward(None, MAMBA1, flat)
    compare.assert_bitwise("o", o, forward(None, MAMBA1, tensors)[0])
    d_o = rng.standard_normal(o.shape)
    got, want = backward(None, MAMBA1, d_o, flat), backward(None, MAMBA1, d_o, tensors)
    for name in flat:
        theirs = getattr(want, "d" + name)
        compare.assert_bitwise(
            name, getattr(got, "d" + name), theirs[:, :, 0] if name in "BC" else theirs
        )
    one = token(MAMBA1, tensors, 0)
    thin = one | {name: one[name][:, 0] for name in "BC"}
    pools = [draw_state(rng, MAMBA1, SIZES, 2, layout="vk") for _ in range(2)]
    pools[1][...] = pools[0]
    compare.assert_bitwise(
        "o", step(None, MAMBA1, thin, state=pools[0]), step(None, MAMBA1, one, state=pools[1])
    )
    compare.assert_bitwise("state", *pools)


# ---- decays and exponents at their ends ---------------------------------------------------------


@calls_with(op=("mamba1",))
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(
    "rates", [(-1.0,), (-5.0,), (-20.0,), (-100.0,), (-1e4,), (-np.inf,), (0.0, -100.0, -1e4)],
    ids=str,
)  # fmt: skip
def test_strong_and_mixed_rates(on, variant, rates, dtype):
    """L01, of decays that come from a time step near 1."""
    rng = np.random.default_rng(6)
    tensors = draw(rng, variant, SIZES, dtype)
    tensors["A"] = rng.choice(rates, tensors["A"].shape).astype(dtype)
    tensors["delta"] = (1 + 0.1 * tensors["delta"].astype(np.float64)).astype(dtype)
    state = draw_state(rng, variant, SIZES, 2, dtype, "vk")
    o, _ = check_forward(on, variant, tensors, initial_state=state)
    d_o = rng.standard_normal(o.shape).astype(dtype)
    got = check_backward(on, variant, d_o, tensors, initial_state=state)
    assert np.isfinite(o.astype(np.float64)).all()
    assert_finite_gradients(got, tensors)


@calls_with(op=("mamba1",))
def test_a_long_time_step_is_a_reset(on, variant):
    """Where delta' A is below -104 for every number, nothing older reaches the token."""
    rng = np.random.default_rng(7)
    tensors = draw(rng, variant, SIZES)
    tensors["A"][...] = -2.0
    tensors["delta"][:, 20] = 60.0
    state = draw_state(rng, variant, SIZES, 2, layout="vk")
    o, _ = forward(on, variant, tensors, initial_state=state)
    late = {name: x[:, 20:] if name in rows_of(variant, tensors) else x
            for name, x in tensors.items()}  # fmt: skip
    compare.assert_bitwise("o", o[:, 20:], forward(on, variant, late)[0])
    d_o = np.zeros_like(o)
    d_o[:, 20:] = 1
    got = backward(on, variant, d_o, tensors, initial_state=state)
    assert not got.du[:, :20].any() and not got.dinitial_state.any()


@calls_with(op=("rwkv4",))
@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shift", [200.0, -200.0, 1000.0, -1000.0, 1e5])
def test_a_shift_of_every_exponent_does_not_show(on, variant, shift, dtype):
    rng = np.random.default_rng(8)
    tensors = draw(rng, variant, SIZES, dtype)
    tensors["k"] = np.round(tensors["k"] * 64) / 64  # of which the sum with a shift is exact
    o, (p, q, m) = forward(on, variant, tensors, output_final_state=True)
    moved = tensors | dict(k=tensors["k"] + dtype(shift))
    got, final = forward(on, variant, moved, output_final_state=True)
    tolerance = dict(rtol=1e-9, atol=1e-10) if dtype == np.float64 else dict(rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got, o, **tolerance)
    for part, want in zip(final, (p, q, m + dtype(shift)), strict=True):
        np.testing.assert_allclose(part, want, **tolerance)
    gradients = backward(on, variant, np.ones_like(o), moved)
    for name, want in zip(gradients._fields, backward(on, variant, np.ones_like(o), tensors),
                          strict=True):  # fmt: skip
        if want is not None:
            np.testing.assert_allclose(getattr(gradients, name), want, err_msg=name, **tolerance)


@calls_with(op=("rwkv4",))
def test_tokens_without_weight(on, variant):
    """k of -inf: 0 where nothing else is there, elsewhere as if the token had no value."""
    rng = np.random.default_rng(9)
    tensors = draw(rng, variant, SIZES)
    tensors["k"][:, :3] = tensors["k"][:, 11] = -np.inf
    o, final = forward(on, variant, tensors, output_final_state=True)
    assert not o[:, :3].any()
    late = {name: x[:, 3:] if name in rows_of(variant, tensors) else x
            for name, x in tensors.items()}  # fmt: skip
    want, want_final = forward(on, variant, late, output_final_state=True)
    compare.assert_bitwise("o", o[:, 3:], want)
    for part, other in zip(final, want_final, strict=True):
        compare.assert_bitwise("state", part, other)
    other = tensors | dict(v=tensors["v"].copy())
    other["v"][:, 11] = 1e9
    compare.assert_bitwise("o", o, forward(on, variant, other)[0])
    got = backward(on, variant, np.ones_like(o), tensors)
    assert_finite_gradients(got, tensors)
    assert not got.dv[:, 11].any() and not got.dk[:, 11].any()
    one, pool = token(variant, tensors, 0), empty_state(variant, final)
    assert not step(on, variant, one, state=pool).any()
    assert np.isneginf(pool[2]).all() and not pool[0].any()


@calls_with(op=("rwkv4",))
def test_the_usual_empty_state(on, variant):
    """Zeros with a maximum of -1e38, as RWKV's own code begins: in float32 it is none."""
    rng = np.random.default_rng(10)
    tensors = draw(rng, variant, SIZES, np.float32)
    zeros = np.zeros((2, SIZES.channels), np.float32)
    state = (zeros, zeros, np.full_like(zeros, -1e38))
    for got, want in zip(
        parts_of(forward(on, variant, tensors, initial_state=state, output_final_state=True)),
        parts_of(forward(on, variant, tensors, output_final_state=True)),
        strict=True,
    ):
        for part, other in zip(parts_of(got), parts_of(want), strict=True):
            compare.assert_bitwise("state", part, other)


@calls_with(op=("rwkv4",))
def test_gradients_of_an_empty_state_are_those_of_its_limit(on, variant):
    """Numerator and denominator may be learned from zeros: with a finite maximum they have a
    slope there."""
    rng = np.random.default_rng(11)
    tensors = draw(rng, variant, SIZES)
    zeros = np.zeros((2, SIZES.channels))
    d_o = rng.standard_normal((2, SIZES.length, SIZES.channels))

    def loss(numerator):
        return (
            forward(on, variant, tensors, initial_state=(numerator, zeros, zeros))[0] * d_o
        ).sum(1)

    got = backward(on, variant, d_o, tensors, initial_state=(zeros, zeros, zeros))
    slope = (loss(zeros + 1e-6) - loss(zeros - 1e-6)) / 2e-6
    np.testing.assert_allclose(got.dinitial_state[0], slope, rtol=1e-7, atol=1e-8)
    assert not got.dinitial_state[2].any()


# ---- what must not matter -----------------------------------------------------------------------


@every_scan
def test_a_slice_of_a_wide_parent(on, variant):
    """L24 at a small size: the last channels of rows that hold much more, all NaN."""
    rng = np.random.default_rng(12)
    tensors = draw(rng, variant, SIZES, np.float32)
    wide = {}
    for name, x in tensors.items():
        parent = np.full((*x.shape[:-1], 9 * x.shape[-1]), np.nan, np.float32)
        parent[..., -x.shape[-1] :] = x
        wide[name] = parent[..., -x.shape[-1] :]
    o, _ = forward(on, variant, tensors)
    compare.assert_bitwise("o", forward(on, variant, wide)[0], o)
    d_o = rng.standard_normal(o.shape).astype(np.float32)
    got, want = backward(on, variant, d_o, wide), backward(on, variant, d_o, tensors)
    for name in tensors:
        compare.assert_bitwise(name, getattr(got, "d" + name), getattr(want, "d" + name))


@every_scan
def test_left_padding_changes_nothing(on, variant):
    """L38: tokens in front that write nothing and do not decay, the rest of them garbage."""
    rng = np.random.default_rng(13)
    tensors = draw(rng, variant, SIZES)
    nothing = {"x": 0.0, "u": 0.0, "k": -np.inf, "log_decay": 0.0}
    padded = dict(tensors)
    for name in rows_of(variant, tensors):
        front = rng.standard_normal((2, 7, *tensors[name].shape[2:]))
        if name in nothing:
            front[...] = nothing[name]
        padded[name] = np.concatenate([front, tensors[name]], axis=1)
    o, final = forward(on, variant, tensors, output_final_state=True)
    got, got_final = forward(on, variant, padded, output_final_state=True)
    compare.assert_bitwise("o", got[:, 7:], o)
    for part, want in zip(parts_of(got_final), parts_of(final), strict=True):
        compare.assert_bitwise("state", part, want)


@every_scan
def test_long_sequences_of_ones(on, variant):
    """L29: 65,537 tokens, and the last row sees all of them."""
    if variant.id not in ("plain", "linear_delta"):
        return
    length = 65537
    sizes = Sizes(batch=1, length=length, heads_k=1, heads_v=1, dk=2, dv=2)
    tensors = draw(np.random.default_rng(14), variant, sizes, np.float32)
    for name, x in tensors.items():
        x[...] = 0.0 if name in ("log_decay", "A", "D", "delta_bias") else 1.0
    o, _ = forward(on, variant, tensors)
    last = {"hgrn": length, "mamba1": 2 * length, "rwkv4": 1}[variant.op]
    np.testing.assert_allclose(o[0, -1], last, rtol=1e-6)


@every_scan
def test_many_steps_in_a_pool_of_floats(on, variant):
    """L39: 512 tokens of slow decay, the state in float32, beside one call in float64."""
    rng = np.random.default_rng(15)
    sizes = SIZES._replace(batch=1, length=512)
    tensors = draw(rng, variant, sizes)
    if "log_decay" in tensors:
        tensors["log_decay"][...] = np.log(0.999)
    else:
        tensors["A"][...] = -0.001
    whole, final = forward(on, variant, tensors, output_final_state=True)
    narrow = {name: x.astype(np.float32) for name, x in tensors.items()}
    pool = tuple(part.astype(np.float32) for part in parts_of(empty_state(variant, final)))
    given = pool if len(pool) > 1 else pool[0]
    for t in range(sizes.length):
        o = step(on, variant, token(variant, narrow, t), state=given)
    np.testing.assert_allclose(o, whole[:, -1], rtol=1e-4, atol=1e-4 * np.abs(whole[:, -1]).max())
    for part, want in zip(pool, parts_of(final), strict=True):
        np.testing.assert_allclose(part, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
