"""What only the CPU's chunks of the delta rules can get wrong: every length around them, how the
work is cut, similar keys, resets inside them, numbers that are not finite."""

from itertools import pairwise

import numpy as np
import pytest
from harness import BFLOAT16
from linear_cases import (
    DELTA_RULES,
    DTYPES,
    VARIANTS,
    Sizes,
    backward,
    draw,
    draw_state,
    exact,
    exact_state,
    forward,
    step,
    token,
    variant_id,
    with_tokens,
)

import onchip
from onchip.oracle import compare, linear_compare

LONGEST_CHUNK = 32
DELTA = [variant for variant in VARIANTS if variant.op in DELTA_RULES]
every_variant = pytest.mark.parametrize("variant", DELTA, ids=variant_id)
PLAIN = next(v for v in DELTA if v.op == "delta_rule" and v.id == "plain")
GATED = next(v for v in DELTA if v.op == "gated_delta_rule" and v.id == "plain")
KDA = next(v for v in DELTA if v.op == "kda" and v.id == "plain")
GIVEN_DECAY = [v for v in DELTA if "log_decay" in v.tensors() and "A_log" not in v.tensors()]


def judged(variant, tensors, state, d_o=None, d_final=None, **options):
    """cpu's (o, final state, gradients), against the reference in float64."""
    dtype = tensors["v"].dtype
    precise = {name: exact(x) for name, x in tensors.items()}
    got = forward("cpu", variant, tensors, initial_state=state, output_final_state=True, **options)
    want = forward(
        "reference",
        variant,
        precise,
        initial_state=exact_state(state),
        output_final_state=True,
        **options,
    )
    linear_compare.judge("o", got[0], want[0], dtype)
    linear_compare.judge("final_state", got[1], want[1], dtype)
    if d_o is None:
        return (*got, None)
    gradients = backward(
        "cpu", variant, d_o, tensors, initial_state=state, d_final_state=d_final, **options
    )
    wanted = backward(
        "reference",
        variant,
        exact(d_o),
        precise,
        initial_state=exact_state(state),
        d_final_state=exact_state(d_final),
        **options,
    )
    linear_compare.judge_gradients(gradients, wanted, tensors, dtype)
    return (*got, gradients)


def drawn(rng, variant, sizes, dtype=np.float32):
    tensors = draw(rng, variant, sizes, dtype)
    state = draw_state(rng, variant, sizes, sizes.batch, dtype)
    shape = (sizes.batch, sizes.length, sizes.heads_v, sizes.dv)
    d_o = rng.standard_normal(shape).astype(dtype)
    d_final = draw_state(rng, variant, sizes, sizes.batch, dtype)
    return tensors, state, d_o, d_final


@every_variant
def test_chunks_are_the_recurrence_at_every_length(variant):
    for length in range(131):
        rng = np.random.default_rng(length)
        sizes = Sizes(batch=1, length=length, heads_k=1, heads_v=2, dk=5, dv=3)
        judged(variant, *drawn(rng, variant, sizes))


@every_variant
def test_random_splits_hand_the_state_on(variant):
    rng = np.random.default_rng(1)
    sizes = Sizes(batch=1, length=131, heads_k=1, heads_v=1, dk=8, dv=8)
    tensors, state, d_o, d_final = drawn(rng, variant, sizes)
    o, final, gradients = judged(variant, tensors, state, d_o, d_final)
    for _ in range(4):
        inner = np.sort(rng.choice(np.arange(1, sizes.length), 3, replace=False))
        cuts = [0, *inner, sizes.length]
        carried, initials, outputs = state, [], []
        for begin, end in pairwise(cuts):
            initials.append(carried)
            part, carried = forward(
                "cpu",
                variant,
                with_tokens(variant, tensors, begin, end),
                initial_state=carried,
                output_final_state=True,
            )
            outputs.append(part)
        linear_compare.judge("o", np.concatenate(outputs, 1), o, np.float32)
        linear_compare.judge("final_state", carried, final, np.float32)
        d_carried = d_final
        for begin, end, initial in reversed(list(zip(cuts[:-1], cuts[1:], initials, strict=True))):
            got = backward(
                "cpu",
                variant,
                d_o[:, begin:end],
                with_tokens(variant, tensors, begin, end),
                initial_state=initial,
                d_final_state=d_carried,
            )
            d_carried = got.dinitial_state
            each = variant.each
            want = gradients.dv[:, begin * each : end * each]
            linear_compare.judge("dv", got.dv, want, np.float32, linear_compare.GRADIENT)
        linear_compare.judge(
            "dinitial_state",
            d_carried,
            gradients.dinitial_state,
            np.float32,
            linear_compare.GRADIENT,
        )


@every_variant
def test_steps_go_on_from_chunks(variant):
    rng = np.random.default_rng(2)
    sizes = Sizes(batch=1, length=LONGEST_CHUNK + 15, dk=12, dv=20)
    tensors, state, _, _ = drawn(rng, variant, sizes)
    o, final, _ = judged(variant, tensors, state)
    at = LONGEST_CHUNK + 3
    head = with_tokens(variant, tensors, 0, at)
    _, carried = forward("cpu", variant, head, initial_state=state, output_final_state=True)
    for t in range(at, sizes.length):
        got = step("cpu", variant, token(variant, tensors, t), state=carried)
        linear_compare.judge("o", got, o[:, t], np.float32)
    linear_compare.judge("state", carried, final, np.float32)


@every_variant
@pytest.mark.parametrize(
    "dims", [(1, 4), (3, 1), (16, 16), (33, 65), (128, 16), (64, 200)], ids=str
)
def test_widths(variant, dims):
    rng = np.random.default_rng(3)
    # The gradients of A_log and dt_bias are sums that cancel: one number in fp32 has no bound.
    precise = "A_log" in variant.tensors()
    for dtype in (np.float64,) if precise else (np.float32, np.float64):
        sizes = Sizes(batch=1, length=77, heads_k=1, heads_v=1, dk=dims[0], dv=dims[1])
        judged(variant, *drawn(rng, variant, sizes, dtype))


def on_threads(counts, call):
    """The results of call(count) with each number of threads."""
    threads = onchip.get_num_threads()
    try:
        for count in counts:
            onchip.set_num_threads(count)
            yield [x for x in call(count) if x is not None]
    finally:
        onchip.set_num_threads(threads)


@every_variant
@pytest.mark.parametrize("heads_v", [1, 2, 6])
def test_threads_change_no_bit(variant, heads_v):
    """One head is cut into slices of its values, many are not."""
    rng = np.random.default_rng(4)
    heads_k = 2 if heads_v == 6 else heads_v
    sizes = Sizes(batch=1, length=75, heads_k=heads_k, heads_v=heads_v, dk=16, dv=130)
    tensors, state, d_o, d_final = drawn(rng, variant, sizes)

    def call(count):
        gradients = backward(
            "cpu", variant, d_o, tensors, initial_state=state, d_final_state=d_final
        )
        o, final = forward("cpu", variant, tensors, initial_state=state, output_final_state=True)
        return (o, final, *gradients)

    first, *others = on_threads((1, 2, 3, 7), call)
    for other in others:
        for got, want in zip(other, first, strict=True):
            compare.assert_bitwise("threads", got, want)


@every_variant
@pytest.mark.parametrize("lengths", [(1100,), (5, 0, 700, 64, 3, 130)], ids=str)
def test_chunks_side_by_side_change_no_bit(variant, lengths):
    """With one thread chunks run in order; with many, windows of them, from kept states that lie
    further and further apart."""
    rng = np.random.default_rng(9)
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    sizes = Sizes(heads_k=1, heads_v=2, dk=20, dv=70)
    tensors = draw(rng, variant, sizes, np.float32, lead=(int(cu[-1]),))
    if variant in GIVEN_DECAY and variant.tensors()["log_decay"] != "head":
        # A chunk ends before a reset: windows of few rows.
        tensors["log_decay"][rng.random(len(tensors["log_decay"])) < 0.02] = -np.inf
    state = draw_state(rng, variant, sizes, len(lengths), np.float32)
    d_o = rng.standard_normal((int(cu[-1]), sizes.heads_v, sizes.dv)).astype(np.float32)
    d_final = draw_state(rng, variant, sizes, len(lengths), np.float32)
    chunk_lens = {1: None, 7: 16, 8: 160, 20: 512, 40: 4096}

    def call(count):
        kwargs = dict(initial_state=state, cu_seqlens=cu, chunk_len=chunk_lens[count])
        o, final = forward("cpu", variant, tensors, output_final_state=True, **kwargs)
        gradients = backward("cpu", variant, d_o, tensors, d_final_state=d_final, **kwargs)
        return (o, final, *gradients)

    first, *others = on_threads(chunk_lens, call)
    for other in others:
        for got, want in zip(other, first, strict=True):
            compare.assert_bitwise("threads", got, want)


@pytest.mark.parametrize("variant", [PLAIN, GATED, KDA], ids=variant_id)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_not_finite_side_by_side(variant, name):
    rng = np.random.default_rng(10)
    sizes = Sizes(batch=1, length=700, heads_k=1, heads_v=1, dk=8, dv=8)
    tensors, state, d_o, d_final = drawn(rng, variant, sizes)
    tensors[name][0, 333, 0, 3] = np.inf
    if "log_decay" in tensors:
        tensors["log_decay"][:, 444] = -np.inf

    def call(count):
        kwargs = dict(initial_state=state, chunk_len=160)
        o, final = forward("cpu", variant, tensors, output_final_state=True, **kwargs)
        return (
            o,
            final,
            *backward("cpu", variant, d_o, tensors, d_final_state=d_final, **kwargs),
        )

    first, other = on_threads((1, 3), call)
    assert not np.isfinite(first[0]).all()
    for got, want in zip(other, first, strict=True):
        np.testing.assert_array_equal(got, want)


@every_variant
def test_states_between_kept_ones_are_made_again(variant):
    """More chunks than states are kept by default."""
    rng = np.random.default_rng(5)
    sizes = Sizes(batch=1, length=300, heads_k=1, heads_v=2, dk=4, dv=5)
    tensors, state, d_o, d_final = drawn(rng, variant, sizes)
    kwargs = dict(initial_state=state, d_final_state=d_final)
    whole = backward("cpu", variant, d_o, tensors, chunk_len=16, **kwargs)
    for chunk_len in (48, 160, 4096):
        got = backward("cpu", variant, d_o, tensors, chunk_len=chunk_len, **kwargs)
        for one, want in zip(got, whole, strict=True):
            if want is not None:
                compare.assert_bitwise("kept", one, want)


@pytest.mark.parametrize("variant", GIVEN_DECAY, ids=variant_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_mixed_resets(variant, dtype):
    """Resets of single channels, of whole rows, and of all rows."""
    if variant.tensors()["log_decay"] == "head":
        return
    for seed, share in enumerate((0.05, 0.5, 1.0)):
        rng = np.random.default_rng(seed)
        sizes = Sizes(batch=1, length=150, heads_k=1, heads_v=2, dk=7, dv=9)
        tensors, state, d_o, d_final = drawn(rng, variant, sizes, dtype)
        decay = tensors["log_decay"]
        strong = rng.choice([-100.0, -1e4, -np.inf], decay.shape)
        decay[...] = np.where(rng.random(decay.shape) < share, strong, decay)
        _, _, gradients = judged(variant, tensors, state, d_o, d_final)
        reset = exact(decay) < -104
        assert not exact(gradients.dlog_decay)[reset].any()


def similar_keys(rng, shape, cosine):
    base = rng.standard_normal((*shape[:1], 1, *shape[2:]))
    keys = np.sqrt(cosine) * base + np.sqrt(1 - cosine) * rng.standard_normal(shape)
    return keys / np.linalg.norm(keys, axis=-1, keepdims=True)


def chunk_form(q, k, v, log_decay, beta, scale, dtype):
    """The direct chunk form of one head, chunks of 64 rows, in one arithmetic: (o, state)."""
    state = np.zeros((k.shape[1], v.shape[1]), dtype)
    outputs = []
    for first in range(0, len(q), 64):
        at = slice(first, first + 64)
        total = np.cumsum(log_decay[at])
        pair = np.tril(np.exp(total[:, None] - total[None, :])).astype(dtype)
        carried = np.exp(total).astype(dtype)[:, None]
        erase = (beta[at, None] * k[at]).astype(dtype)
        a = np.tril((erase @ k[at].T) * pair, -1)
        u = beta[at, None] * v[at] - (erase * carried) @ state
        for i in range(1, len(u)):
            u[i] -= a[i, :i] @ u[:i]
        p = (q[at] @ k[at].T) * pair * dtype(scale)
        outputs.append(dtype(scale) * (q[at] * carried) @ state + p @ u)
        kept = (k[at] * np.exp(total[-1] - total).astype(dtype)[:, None]).astype(dtype)
        state = carried[-1] * state + kept.T @ u
    return np.concatenate(outputs), state


def rms(x):
    return np.sqrt(np.mean(np.square(np.asarray(x, np.float64))))


@pytest.mark.parametrize("variant", [PLAIN, GATED, KDA], ids=variant_id)
@pytest.mark.parametrize("cosine", [0.8, 0.99, 1.0])
@pytest.mark.parametrize("beta", [0.5, 0.98, 1.9, 2.0])
def test_similar_keys(variant, cosine, beta):
    """No worse than the direct chunk form; an inverse by powers would lose all digits here."""
    rng = np.random.default_rng(6)
    shape = (1, 300, 1, 64)
    k = similar_keys(rng, shape, cosine).astype(np.float32)
    q, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    decay = -1e-4 * np.abs(rng.standard_normal(shape[:3])).astype(np.float32)
    betas = np.full(shape[:3], beta, np.float32)
    tensors = {"q": q, "k": k, "v": v, "beta": betas}
    if variant is GATED:
        tensors = {"q": q, "k": k, "v": v, "log_decay": decay, "beta": betas}
    elif variant is KDA:
        channels = np.repeat(decay[..., None], shape[3], axis=3)
        tensors = {"q": q, "k": k, "v": v, "log_decay": channels, "beta": betas}
    else:
        decay = np.zeros_like(decay)
    plain = variant._replace(options={})
    got = forward("cpu", plain, tensors, scale=0.125, output_final_state=True)
    want = forward(
        "reference",
        plain,
        {name: exact(x) for name, x in tensors.items()},
        scale=0.125,
        output_final_state=True,
    )
    form = chunk_form(
        q[0, :, 0], k[0, :, 0], v[0, :, 0], decay[0, :, 0], betas[0, :, 0], 0.125, np.float32
    )
    for ours, right, theirs in (
        (got[0][0, :, 0], want[0][0, :, 0], form[0]),
        (got[1][0, 0], want[1][0, 0], form[1]),
    ):
        error, of_form = rms(ours - right), rms(theirs - right)
        assert error <= 1.25 * of_form + 1e-7 * rms(right), (error, of_form, rms(right))
    d_o = rng.standard_normal(shape).astype(np.float32)
    wide = {name: exact(x) for name, x in tensors.items()}
    gradients = backward("cpu", plain, d_o, tensors, scale=0.125)
    wanted = backward("reference", plain, exact(d_o), wide, scale=0.125)
    for name in ("q", "k", "v", "beta"):
        linear_compare.judge(
            "d" + name,
            getattr(gradients, "d" + name),
            getattr(wanted, "d" + name),
            np.float32,
            linear_compare.GATE_GRADIENT if name == "beta" else linear_compare.GRADIENT,
        )
    if variant is not PLAIN:
        right = wanted.dlog_decay
        size = max(rms(right), rms(np.sum(wide["q"] * wanted.dq, axis=-1)))
        assert rms(gradients.dlog_decay - right) <= 1e-4 * size


@pytest.mark.parametrize("variant", GIVEN_DECAY, ids=variant_id)
@pytest.mark.parametrize("decay", [-1e-4, -5.0, -20.0, -60.0])
def test_gradients_of_decays_keep_their_digits(variant, decay):
    """What does not cross a row is left out of its gradient: it may be e^60 times as large."""
    rng = np.random.default_rng(9)
    sizes = Sizes(batch=1, length=100, heads_k=1, heads_v=1, dk=16, dv=16)
    tensors, state, d_o, d_final = drawn(rng, variant, sizes)
    shape = tensors["log_decay"].shape
    tensors["log_decay"] = (decay * (1 + 0.1 * rng.random(shape))).astype(np.float32)
    _, _, gradients = judged(variant, tensors, state, d_o, d_final)
    precise = {name: exact(x) for name, x in tensors.items()}
    options = dict(initial_state=exact(state), d_final_state=exact(d_final))
    want = backward("reference", variant, exact(d_o), precise, **options).dlog_decay
    assert rms(gradients.dlog_decay - want) <= 1e-4 * rms(want)


@pytest.mark.parametrize("variant", [PLAIN, GATED, KDA], ids=variant_id)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_not_finite_stays_where_the_recurrence_has_it(variant, name):
    rng = np.random.default_rng(7)
    sizes = Sizes(batch=1, length=90, heads_k=1, heads_v=1, dk=8, dv=8)
    for at in (0, 40, 63):
        for value in (np.inf, np.nan):
            tensors = draw(rng, variant, sizes, np.float32)
            if "log_decay" in tensors:
                tensors["log_decay"][:, at + 9] = -np.inf
            tensors[name][0, at, 0, 3] = value
            o, _ = forward("cpu", variant, tensors)
            want, _ = forward("reference", variant, tensors)
            np.testing.assert_array_equal(np.isfinite(o), np.isfinite(want))


def test_gates_in_another_precision():
    rng = np.random.default_rng(8)
    sizes = Sizes(batch=1, length=50, heads_k=1, heads_v=2, dk=16, dv=16)
    for variant in DELTA:
        tensors, state, d_o, d_final = drawn(rng, variant, sizes, BFLOAT16)
        for name in tensors:
            if name not in ("q", "k", "v"):
                tensors[name] = tensors[name].astype(np.float32)
        state, d_final = state.astype(np.float32), d_final.astype(np.float32)
        judged(variant, tensors, state, d_o, d_final)
