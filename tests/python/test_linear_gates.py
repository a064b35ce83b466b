"""Decays and gates at their ends: resets, strong and mixed decay, small growth, saturated gates.
What the recurrence says has to come out finite, gradients included."""

import numpy as np
import pytest
from harness import BFLOAT16
from linear_cases import (
    CONSTANT_SHAPES,
    DTYPES,
    SCANS,
    VARIANTS,
    Sizes,
    Variant,
    backward,
    call_id,
    calls_of,
    calls_with,
    check_backward,
    check_forward,
    draw,
    draw_state,
    exact,
    forward,
    parts_of,
    rows_of,
    with_tokens,
)

import onchip
from onchip.oracle import compare, linear_compare

GIVEN_DECAY = [v for v in VARIANTS if "log_decay" in v.tensors() and "A_log" not in v.tensors()]
decayed = pytest.mark.parametrize(("on", "variant"), calls_of(GIVEN_DECAY), ids=call_id)
# A decay a token, and nothing that reads the state before it.
cut_by_resets = pytest.mark.parametrize(
    ("on", "variant"),
    calls_of(
        v
        for v in GIVEN_DECAY
        if v.tensors()["log_decay"] not in CONSTANT_SHAPES
        and v.op not in ("rwkv6", "comba", "rwkv7")
    ),
    ids=call_id,
)


def calls_where(condition):
    chosen = [variant for variant in VARIANTS if condition(variant)]
    assert chosen
    return pytest.mark.parametrize(("on", "variant"), calls_of(chosen), ids=call_id)


SIZES = Sizes(batch=1, length=70, heads_k=2, heads_v=2, dk=8, dv=4)


def assert_same_sums(on, got, want):
    """The same numbers where tokens have moved: their sums have another order if chunks are
    summed."""
    if on == "reference":
        compare.assert_bitwise("moved", got, want)
    else:
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12)


def run_both_ways(on, variant, tensors, dtype=np.float32, sizes=SIZES):
    rng = np.random.default_rng(0)
    state = draw_state(rng, variant, sizes, 1, dtype, variant.layout({}))
    o, final = check_forward(on, variant, tensors, initial_state=state)
    d_o = rng.standard_normal(o.shape).astype(dtype)
    got = check_backward(on, variant, d_o, tensors, initial_state=state)
    for name in tensors:
        assert np.isfinite(getattr(got, "d" + name).astype(np.float64)).all(), name
    assert np.isfinite(o.astype(np.float64)).all()
    return o, final, got


@decayed
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(
    "values",
    [(-1.0,), (-5.0,), (-20.0,), (-100.0,), (-1e4,), (-np.inf,), (0.0, -100.0),
     (-1e-3, -100.0, -1e4, -np.inf)],
    ids=str,
)  # fmt: skip
def test_strong_and_mixed_decay(on, variant, values, dtype):
    rng = np.random.default_rng(1)
    tensors = draw(rng, variant, SIZES, dtype)
    shape = tensors["log_decay"].shape
    tensors["log_decay"] = rng.choice(values, shape).astype(dtype)
    run_both_ways(on, variant, tensors, dtype)


@decayed
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=lambda d: np.dtype(d).name)
def test_strong_decay_over_chunks(on, variant, dtype):
    """Every chunk of four in a decay of its own, the last ones of all kinds."""
    rng = np.random.default_rng(16)
    sizes = SIZES._replace(length=256, dk=16, dv=16)
    tensors = draw(rng, variant, sizes, dtype)
    decay = tensors["log_decay"]
    if decay.ndim > 1:
        for chunk, value in enumerate((-1e-3, -1.0, -5.0, -20.0, -100.0, -1e4)):
            decay[:, 32 * chunk : 32 * (chunk + 1)] = value
        tail = decay[:, 192:].shape
        decay[:, 192:] = rng.choice([-1e-3, -100.0, -104.0, -104.5, -1e4, -np.inf], tail)
    run_both_ways(on, variant, tensors, dtype, sizes)


@cut_by_resets
def test_a_reset_cuts_exactly(on, variant):
    """Nothing before a token whose log_decay is below -104 reaches it, whatever it was."""
    rng = np.random.default_rng(2)
    tensors = draw(rng, variant, SIZES)
    for value in (-104.5, -1e4, -np.inf):
        at = 23
        cut = {name: x.copy() for name, x in tensors.items()}
        cut["log_decay"][:, at] = value
        o, _ = forward(on, variant, cut)
        late = with_tokens(variant, cut, at, SIZES.length)
        want, _ = forward(on, variant, late)
        np.testing.assert_allclose(o[:, at:], want, rtol=1e-12, atol=1e-13)
        d_o = rng.standard_normal(o.shape)
        d_o[:, :at] = 0
        got = backward(on, variant, d_o, cut)
        gradients = {name: getattr(got, "d" + name) for name in cut}
        for name, early in with_tokens(variant, gradients, 0, at).items():
            assert not early.any(), name
    # At -104 itself the past still counts.
    cut["log_decay"][:, at] = -104.0
    cut[variant.values][:, at * variant.each - 1] = 1e60
    o, _ = forward(on, variant, cut)
    assert np.abs(o[:, at]).max() > 1e3


@cut_by_resets
def test_a_state_that_is_not_finite_ends_at_a_reset(on, variant):
    rng = np.random.default_rng(3)
    tensors = draw(rng, variant, SIZES)
    tensors[variant.values][:, 3] = np.inf
    tensors["log_decay"][:, 9] = -np.inf
    o, final = forward(on, variant, tensors, output_final_state=True)
    assert not np.isfinite(o[:, 5]).any()
    late = with_tokens(variant, tensors, 9, SIZES.length)
    want, want_final = forward(on, variant, late, output_final_state=True)
    assert_same_sums(on, o[:, 9:], want)
    for part, other in zip(parts_of(final), parts_of(want_final), strict=True):
        assert_same_sums(on, part, other)


@decayed
def test_small_growth_follows_the_recurrence(on, variant):
    rng = np.random.default_rng(4)
    sizes = SIZES._replace(length=12)
    tensors = draw(rng, variant, sizes, np.float32)
    tensors["log_decay"][...] = 0.5
    o, _ = check_forward(on, variant, tensors)
    check_backward(on, variant, rng.standard_normal(o.shape).astype(np.float32), tensors)
    with pytest.raises(onchip.InvalidArgument, match=r"log_decay: got 0\.5 .*\[-inf, 0\]"):
        forward(on, variant, tensors, check=True)
    tensors["log_decay"][...] = np.nan
    with pytest.raises(onchip.InvalidArgument, match="log_decay: got nan"):
        forward(on, variant, tensors, check=True)
    tensors["log_decay"][...] = -np.inf
    forward(on, variant, tensors, check=True)


@cut_by_resets
def test_the_first_decay_meets_nothing(on, variant):
    """Without an initial state, what the first token's decay multiplies is 0."""
    if variant.op == "hgrn2":  # its keys come from the decay
        return
    rng = np.random.default_rng(5)
    tensors = draw(rng, variant, SIZES._replace(length=4))
    o, _ = forward(on, variant, tensors)
    tensors["log_decay"][:, 0] = 176.0
    compare.assert_bitwise("o", forward(on, variant, tensors)[0], o)


@calls_with(op=("mlstm",), parts=3)
@pytest.mark.parametrize("shift", [200.0, -200.0, 1000.0, -1000.0])
@pytest.mark.parametrize("forget", [-100.0, 0.0, 100.0])
def test_mlstm_at_any_input_gate(on, variant, shift, forget):
    rng = np.random.default_rng(6)
    sizes = SIZES._replace(length=20)
    tensors = draw(rng, variant, sizes, np.float32)
    tensors["f"][...] = forget
    for name in ("q", "k"):  # no denominator near 0
        tensors[name] = np.abs(tensors[name]) + np.float32(0.1)
    plain = variant._replace(options={})
    tensors["i"] += np.float32(shift)
    o, _ = forward(on, plain, tensors)
    if abs(shift) < 700:  # where float64 has e^shift, which the plain loop takes
        check_forward(on, plain, tensors)
    got = backward(on, plain, np.ones_like(o), tensors)
    assert np.isfinite(o).all()
    for name in tensors:
        assert np.isfinite(getattr(got, "d" + name)).all(), name
    if shift > 0:
        # num / |den|: what the shift multiplies both of does not show.
        tensors["i"] += np.float32(1.0)
        np.testing.assert_allclose(forward(on, plain, tensors)[0], o, rtol=2e-3, atol=1e-4)
    else:
        assert np.abs(o).max() < 1e-30


@calls_with(op=("mlstm",))
def test_mlstm_with_closed_gates(on, variant):
    """i or f of -inf: nothing written, everything forgotten."""
    rng = np.random.default_rng(7)
    tensors = draw(rng, variant, SIZES, np.float32)
    tensors["f"][:, 5] = -np.inf
    tensors["i"][:, 9] = -np.inf
    tensors["f"][:, 20] = -np.inf
    tensors["i"][:, 20] = -np.inf
    o, _ = forward(on, variant, tensors)
    assert np.isfinite(o).all() and not o[:, 20].any()
    if "eps" not in variant.options:  # eps counts in units of e^m, and m remembers
        late = {name: x[:, 21:] for name, x in tensors.items()}
        want, _ = forward(on, variant, late)
        np.testing.assert_allclose(o[:, 21:], want, rtol=1e-4, atol=1e-5)
    got = backward(on, variant, np.ones_like(o), tensors)
    for name in tensors:
        assert np.isfinite(getattr(got, "d" + name)).all(), name


@pytest.mark.parametrize(
    ("on", "variant"),
    calls_of([Variant("mamba1", "softplus"), Variant("mamba2", "softplus")]),
    ids=call_id,
)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, BFLOAT16])
def test_the_time_step_over_20(on, variant, dtype):
    """softplus is the identity there and its slope 1; far below 0 both vanish."""
    variant = variant._replace(without=("D", "z", "dt_bias", "delta_bias"))
    values = np.array([-30.0, 0.0, 19.9, 20.1, 25.0, 100.0])
    sizes = Sizes(batch=1, length=len(values), heads_k=1, heads_v=1)
    tensors = draw(np.random.default_rng(8), variant, sizes, dtype)
    tensors["dt" if "dt" in tensors else "delta"][0, :, 0] = values
    tensors["A"][...] = -1e-3
    check_forward(on, variant, tensors)
    check_backward(on, variant, np.ones_like(tensors[variant.values]), tensors)


@calls_where(lambda variant: "A_log" in variant.tensors())
@pytest.mark.parametrize("dtype", [np.float64, np.float32, BFLOAT16])
def test_raw_gates_at_their_ends(on, variant, dtype):
    """softplus of gates up to 100, sigmoids of both ends: finite, and their slopes vanish."""
    values = np.array([-1e4, -100.0, -30.0, 0.0, 19.9, 20.1, 25.0, 100.0])
    sizes = Sizes(batch=1, length=len(values) * 5, heads_k=1, heads_v=1, dk=8, dv=8)
    rng = np.random.default_rng(17)
    tensors = draw(rng, variant, sizes, dtype)
    tensors["A_log"][...] = -8.0  # decays that keep something
    for name in ("log_decay", "beta"):
        tensors[name][...] = rng.choice(values, tensors[name].shape)
    run_both_ways(on, variant, tensors, dtype, sizes)


@calls_with(op=("mamba2",))
def test_a_positive_rate_is_found_by_check(on, variant):
    tensors = draw(np.random.default_rng(9), variant, Sizes())
    forward(on, variant, tensors, check=True)
    tensors["A"][1] = 1e-9
    with pytest.raises(onchip.InvalidArgument, match="A: got 1e-09 for head 1"):
        forward(on, variant, tensors, check=True)


@calls_with(op=("mamba1",))
def test_a_positive_rate_of_a_scan_is_found_by_check(on, variant):
    tensors = draw(np.random.default_rng(9), variant, Sizes())
    forward(on, variant, tensors, check=True)
    tensors["A"][5, 2] = 1e-9
    with pytest.raises(onchip.InvalidArgument, match="A: got 1e-09 for channel 5"):
        forward(on, variant, tensors, check=True)


@calls_with(op=("gla", "rwkv7", "gsa"))
def test_growth_in_any_channel_is_found_by_check(on, variant):
    tensors = draw(np.random.default_rng(9), variant, Sizes())
    forward(on, variant, tensors, check=True)
    tensors["log_decay"][1, 3, 2, -1] = 0.25
    with pytest.raises(onchip.InvalidArgument, match=r"log_decay: got 0\.25 for head 2, row 3"):
        forward(on, variant, tensors, check=True)


@calls_with(op=("linear_attention", "simple_gla"))
def test_long_sequences_of_ones(on, variant):
    """65,537 tokens: the last row sees all of them."""
    if variant.id == "head":
        return
    shape = (1, 65537, 2, 8)
    tensors = {name: np.ones(shape, np.float32) for name in "qkv"}
    if "log_decay" in variant.tensors():
        tensors["log_decay"] = np.zeros(shape[:3], np.float32)
    o, _ = forward(on, variant, tensors, scale=1.0)
    last = 1.0 if variant.options else 8.0 * shape[1]
    np.testing.assert_allclose(o[0, -1], last, rtol=1e-6)


@calls_with(op=("delta_rule", "gated_delta_rule"))
def test_long_sequences_of_one_key(on, variant):
    """65,537 tokens, each in place of the one before: the last row reads the last value."""
    if variant.id not in ("plain", "no_decay"):
        return
    rng = np.random.default_rng(18)
    shape = (1, 65537, 2, 8)
    tensors = {name: np.full(shape, 8**-0.5, np.float32) for name in "qk"}
    tensors["v"] = rng.standard_normal(shape).astype(np.float32)
    if "log_decay" in variant.tensors():
        tensors["log_decay"] = np.zeros(shape[:3], np.float32)
    tensors["beta"] = np.ones(shape[:3], np.float32)
    o, _ = forward(on, variant, tensors, scale=1.0)
    for t in (0, 65535, 65536):
        np.testing.assert_allclose(o[0, t], tensors["v"][0, t], rtol=1e-3, atol=1e-4)


# What a token of padding holds, where it is neither decay nor anything: numbers of no consequence.
PADDING = {
    **dict.fromkeys(("k", "beta", "b", "s", "B"), 0.0),
    "log_decay": 0.0,
    "i": -np.inf,
    "f": 200.0,
    "dt": -1e4,
}
RAW_PADDING = {**PADDING, "beta": -1e4, "log_decay": -1e4}


@calls_where(lambda variant: variant.op not in SCANS)
def test_left_padding_changes_nothing(on, variant):
    """Tokens that write nothing and keep everything, q and v garbage, in front of the real ones:
    outputs, final state and the real tokens' gradients are those without."""
    if variant.id in ("limits", "linear_dt"):  # their steps cannot be 0
        return
    rng = np.random.default_rng(10)
    tensors = draw(rng, variant, SIZES)
    kinds = variant.tensors()
    kept = variant.op not in ("retention", "lightning_attention") and (
        "log_decay" not in kinds or kinds["log_decay"] not in ("head", "head_key")
    )
    # A decay of the head's own applies to padding too.
    layout = variant.layout({})
    state = draw_state(rng, variant, SIZES, 1, layout=layout) if kept else None
    values = RAW_PADDING if "A_log" in kinds else PADDING
    padded = dict(tensors)
    for name in rows_of(variant, tensors):
        x = tensors[name]
        count = 7 * (x.shape[1] // SIZES.length)
        front = rng.standard_normal((1, count, *x.shape[2:]))
        if name in values:  # hgrn2's key is 1 - e^0
            front[...] = values[name]
        padded[name] = np.concatenate([front, x], axis=1)
    call = dict(initial_state=state, output_final_state=True)
    o, final = forward(on, variant, tensors, **call)
    got, got_final = forward(on, variant, padded, **call)
    np.testing.assert_allclose(got[:, 7:], o, rtol=1e-10, atol=1e-11)
    for part, other in zip(parts_of(got_final), parts_of(final), strict=True):
        np.testing.assert_allclose(part, other, rtol=1e-10, atol=1e-11)
    d_o = rng.standard_normal(got.shape)
    d_o[:, :7] = 0.0
    gradients = backward(on, variant, d_o, padded, initial_state=state)
    wanted = backward(on, variant, d_o[:, 7:], tensors, initial_state=state)
    late = with_tokens(
        variant, {name: getattr(gradients, "d" + name) for name in tensors}, 7, SIZES.length + 7
    )
    for name in tensors:
        want = getattr(wanted, "d" + name)
        np.testing.assert_allclose(late[name], want, rtol=1e-9, atol=1e-10, err_msg=name)


# ---- delta rules ---------------------------------------------------------------------------------


def plain_delta(variant):
    """One rule a token, beta and keys as they are."""
    return (
        variant.op in ("delta_rule", "gated_delta_rule", "kda", "gated_delta_product")
        and "A_log" not in variant.tensors()
        and variant.each == 1
        and not variant.options.get("qk_l2norm")
    )


plain_deltas = calls_where(plain_delta)


def undecayed(variant, tensors):
    if "log_decay" in tensors:
        tensors["log_decay"] = np.zeros_like(tensors["log_decay"])
    return tensors


def unit_keys(rng, shape, spread):
    """Keys of length 1; `spread` 0: all alike."""
    base = rng.standard_normal((1, 1, *shape[2:]))
    k = base + spread * rng.standard_normal(shape)
    return k / np.linalg.norm(k, axis=-1, keepdims=True)


@plain_deltas
def test_beta_at_its_ends(on, variant):
    """0 writes nothing; 1 replaces; 2 reflects, and twice is back."""
    rng = np.random.default_rng(11)
    sizes = Sizes(batch=1, length=2, heads_k=1, heads_v=1, dk=8, dv=4)
    tensors = undecayed(variant, draw(rng, variant, sizes))
    state = draw_state(rng, variant, sizes, 1)
    tensors["k"] = unit_keys(rng, tensors["k"].shape, 0.0)

    def final(beta, **changed):
        everything = {**tensors, "beta": np.full_like(tensors["beta"], beta), **changed}
        return forward(on, variant, everything, initial_state=state, output_final_state=True)[1]

    compare.assert_bitwise("state", final(0.0), state)
    read = np.einsum("hkv,hk->hv", final(1.0)[0], tensors["k"][0, -1])
    np.testing.assert_allclose(read, tensors["v"][0, -1], rtol=1e-12, atol=1e-13)
    back = final(2.0, v=np.zeros_like(tensors["v"]))
    np.testing.assert_allclose(back, state, rtol=1e-12, atol=1e-13)


@plain_deltas
def test_equal_keys_of_beta_one(on, variant):
    """Each token replaces what the one before wrote: o_t = scale (q_t.k) v_t."""
    rng = np.random.default_rng(12)
    sizes = Sizes(batch=1, length=64, heads_k=1, heads_v=1, dk=8, dv=4)
    tensors = undecayed(variant, draw(rng, variant, sizes))
    tensors["k"] = unit_keys(rng, tensors["k"].shape, 0.0)
    tensors["beta"][...] = 1.0
    o, _ = forward(on, variant, tensors, scale=1.0)
    weight = (tensors["q"] * tensors["k"]).sum(-1, keepdims=True)
    np.testing.assert_allclose(o, weight * tensors["v"], rtol=1e-11, atol=1e-12)


@plain_deltas
@pytest.mark.parametrize("spread", [0.0, 0.05, 0.15, 1.0])
@pytest.mark.parametrize("beta", [0.5, 0.98, 1.9])
def test_correlated_keys(on, variant, spread, beta):
    rng = np.random.default_rng(13)
    sizes = Sizes(batch=1, length=130, heads_k=1, heads_v=2, dk=16, dv=8)
    tensors = undecayed(variant, draw(rng, variant, sizes, np.float32))
    tensors["k"] = unit_keys(rng, tensors["k"].shape, spread).astype(np.float32)
    tensors["beta"][...] = beta
    state = draw_state(rng, variant, sizes, 1, np.float32)
    o, _ = check_forward(on, variant, tensors, initial_state=state)
    check_backward(
        on, variant, rng.standard_normal(o.shape).astype(np.float32), tensors, initial_state=state
    )


@plain_deltas
@pytest.mark.parametrize("size", [0.25, 0.5, 1.0])
def test_keys_that_are_not_normalised(on, variant, size):
    """The recurrence itself grows where beta |k|^2 > 2: judged by its size."""
    rng = np.random.default_rng(19)
    sizes = Sizes(batch=1, length=64, heads_k=1, heads_v=2, dk=16, dv=8)
    tensors = undecayed(variant, draw(rng, variant, sizes, np.float32))
    tensors["k"] = (size * rng.standard_normal(tensors["k"].shape)).astype(np.float32)
    o, final = check_forward(on, variant, tensors)
    assert np.isfinite(o).all() and np.isfinite(final).all()


@plain_deltas
def test_gradients_of_late_gates_keep_their_digits(on, variant):
    """Early tokens of 1e8 are not in the sums of the late ones of 1, not even to be subtracted."""
    if "log_decay" not in variant.tensors() or variant.tensors()["log_decay"] == "head":
        return
    late_gates(on, variant)


@calls_with(op=("simple_gla", "gla"))
def test_gradients_of_late_gates_keep_their_digits_without_a_rule(on, variant):
    if variant.tensors().get("log_decay") in ("scalar", "channel"):
        late_gates(on, variant)


def late_gates(on, variant):
    rng = np.random.default_rng(20)
    sizes = Sizes(batch=1, length=64, heads_k=1, heads_v=1, dk=8, dv=8)
    tensors = undecayed(variant, draw(rng, variant, sizes, np.float32))
    d_o = rng.standard_normal((1, 64, 1, 8)).astype(np.float32)
    d_o[:, :32] *= 1e8
    got = backward(on, variant, d_o, tensors).dlog_decay[:, 32:]
    precise = {name: exact(x) for name, x in tensors.items()}
    want = backward("reference", variant, exact(d_o), precise).dlog_decay[:, 32:]
    linear_compare.judge("dlog_decay", got, want, np.float32, linear_compare.GATE_GRADIENT)


@calls_where(lambda variant: variant.options.get("qk_l2norm"))
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_zeros_have_a_norm(on, variant, dtype):
    """q = k = 0 under qk_l2norm: output 0, gradients finite; so with a few such rows."""
    rng = np.random.default_rng(14)
    tensors = draw(rng, variant, SIZES, dtype)
    tensors["q"][:, 5:9] = tensors["k"][:, 7:12] = 0.0
    run_both_ways(on, variant, tensors, dtype)
    tensors["q"][...] = tensors["k"][...] = 0.0
    o, _ = forward(on, variant, tensors)
    assert not o.any()
    got = backward(on, variant, np.ones_like(o), tensors)
    for name in tensors:
        assert np.isfinite(exact(getattr(got, "d" + name))).all(), name


@calls_with(op=("rwkv6",))
def test_the_bonus_reads_before_the_decay(on, variant):
    """One decay of e^-e^5 in the middle cuts behind the token that has it, not in front."""
    rng = np.random.default_rng(15)
    tensors = draw(rng, variant, SIZES, np.float32)
    tensors["log_decay"][:, 30] = -np.exp(5.0)
    run_both_ways(on, variant, tensors)
    whole, _ = forward(on, variant, tensors)
    early = {name: x.copy() for name, x in tensors.items()}
    early["v"][:, 29] *= 2
    changed, _ = forward(on, variant, early)
    assert (changed[:, 30] != whole[:, 30]).any()
    compare.assert_bitwise("behind", changed[:, 31:], whole[:, 31:])
