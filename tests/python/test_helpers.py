"""Short causal convolution, L2 norm and gated RMS norm: values against their formulas, gradients
against differences of them, states, splits, steps, and refusals."""

import numpy as np
import pytest
from harness import BFLOAT16, poisoned, restrided

import onchip
from onchip.oracle import compare, helpers, linear_compare

# Each is forced by name.
BACKENDS = ["reference", "cpu"]
DTYPES = [np.float64, np.float32, np.float16, BFLOAT16]
every_backend = pytest.mark.parametrize("on", BACKENDS)
ops = onchip.ops


def wide(x):
    return None if x is None else np.asarray(x).astype(np.float64)


def differences(loss, x, step=1e-6):
    x = x.astype(np.longdouble)
    gradient = np.zeros(x.shape)
    for index in np.ndindex(x.shape):
        centre = x[index]
        x[index] = centre + step
        above = loss(x)
        x[index] = centre - step
        below = loss(x)
        x[index] = centre
        gradient[index] = (above - below) / (2 * step)
    return gradient


def check_differences(loss, tensors, gradients):
    """`loss` takes one changed tensor by name."""
    for name, x in tensors.items():
        want = differences(lambda changed, name=name: loss(**{name: changed}), x)
        np.testing.assert_allclose(gradients[name], want, rtol=1e-8, atol=1e-9, err_msg=name)


def draw_conv(rng, dtype=np.float64, batch=2, length=9, channels=5, width=4):
    def draw(*shape):
        return rng.standard_normal(shape).astype(dtype)

    x, weight, bias = draw(batch, length, channels), draw(channels, width), draw(channels)
    return x, weight, bias, draw(batch, channels, width)


@every_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_convolution_values(on, dtype, activation, with_bias):
    x, weight, bias, state = draw_conv(np.random.default_rng(1), dtype, length=40, channels=24)
    options = dict(activation=activation, bias=bias if with_bias else None)
    y, final = ops.causal_conv1d_forward(
        x, weight, initial_state=state, output_final_state=True, backend=on, **options
    )
    assert y.dtype == final.dtype == x.dtype
    want, want_final = helpers.causal_conv1d(
        wide(x),
        wide(weight),
        activation=activation,
        bias=wide(options["bias"]),
        initial_state=wide(state),
    )
    linear_compare.judge("y", y, want, dtype)
    compare.assert_bitwise("final_state", final, want_final.astype(dtype))


@every_backend
@pytest.mark.parametrize("width", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_convolution_gradients(on, width, length, activation):
    rng = np.random.default_rng(2)
    x, weight, bias, state = draw_conv(rng, length=length, channels=3, width=width)
    d_y, d_final = rng.standard_normal(x.shape), rng.standard_normal(state.shape)
    got = ops.causal_conv1d_backward(
        d_y,
        x,
        weight,
        d_final_state=d_final,
        bias=bias,
        activation=activation,
        initial_state=state,
        backend=on,
    )

    def loss(x=x, weight=weight, bias=bias, state=state):
        y, final = helpers.causal_conv1d(
            x.astype(np.longdouble), weight, bias=bias, activation=activation, initial_state=state
        )
        return (y * d_y).sum() + (final * d_final).sum()

    check_differences(
        loss,
        dict(x=x, weight=weight, bias=bias, state=state),
        dict(x=got.dx, weight=got.dweight, bias=got.dbias, state=got.dinitial_state),
    )
    plain = ops.causal_conv1d_backward(d_y, x, weight, backend=on)
    assert plain.dbias is None and plain.dinitial_state is None


@every_backend
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_the_state_hands_its_gradient_back(on, length):
    """Of a loss on the final state alone: slots that still hold old inputs belong to them."""
    rng = np.random.default_rng(3)
    x, weight, _, state = draw_conv(rng, length=length)
    d_final = rng.standard_normal(state.shape)
    got = ops.causal_conv1d_backward(
        np.zeros_like(x), x, weight, d_final_state=d_final, initial_state=state, backend=on
    )
    width = weight.shape[1]
    for t in range(length):
        slot = t + width - length
        want = d_final[:, :, slot] if slot >= 0 else np.zeros_like(d_final[:, :, 0])
        compare.assert_bitwise("dx", got.dx[:, t], want)
    kept = max(width - length, 0)
    compare.assert_bitwise(
        "dinitial_state", got.dinitial_state[:, :, width - kept :], d_final[:, :, :kept]
    )
    assert not got.dinitial_state[:, :, : width - kept].any()


@every_backend
@pytest.mark.parametrize("prompt", [1, 2, 3, 6])
def test_steps_and_splits_are_one_call(on, prompt):
    x, weight, bias, _ = draw_conv(np.random.default_rng(4), length=9, batch=2)
    options = dict(bias=bias, activation="silu", backend=on)
    whole, final = ops.causal_conv1d_forward(x, weight, output_final_state=True, **options)
    y, state = ops.causal_conv1d_forward(x[:, :prompt], weight, output_final_state=True, **options)
    compare.assert_bitwise("y", y, whole[:, :prompt])
    rest, last = ops.causal_conv1d_forward(
        x[:, prompt:], weight, initial_state=state, output_final_state=True, **options
    )
    compare.assert_bitwise("y", rest, whole[:, prompt:])
    compare.assert_bitwise("final", last, final)
    pool = np.full((4, *state.shape[1:]), 7.0)
    pool[[3, 1]] = state
    for t in range(prompt, 9):
        y = ops.causal_conv1d_step(x[:, t], weight, state=pool, state_indices=[3, 1], **options)
        compare.assert_bitwise("y", y, whole[:, t])
    compare.assert_bitwise("pool", pool[[3, 1]], final)
    assert (pool[[0, 2]] == 7.0).all()
    y = ops.causal_conv1d_step(x[:, 0], weight, state=pool, state_indices=[-1, 0], **options)
    assert not y[0].any() and y[1].all()
    compare.assert_bitwise("pool", pool[[3, 1]], final)


@every_backend
def test_packed_sequences_do_not_meet(on):
    rng = np.random.default_rng(5)
    cu, used = [2, 3, 9, 9, 14], [1, 4, 0, 5]
    x = rng.standard_normal((16, 3))
    outside = np.ones(16, bool)
    for begin, length in zip(cu, used, strict=False):
        outside[begin : begin + length] = False
    x[outside] = np.nan
    weight, state = rng.standard_normal((3, 4)), rng.standard_normal((4, 3, 4))
    lengths = dict(cu_seqlens=cu, seqlens=used)
    y, final = ops.causal_conv1d_forward(
        x, weight, initial_state=state, output_final_state=True, backend=on, **lengths
    )
    assert not y[outside].any()
    d_y = rng.standard_normal(x.shape)
    d_y[outside] = np.nan
    got = ops.causal_conv1d_backward(d_y, x, weight, initial_state=state, backend=on, **lengths)
    assert not got.dx[outside].any()
    dweight = np.zeros_like(weight)
    for n in range(4):
        rows = slice(cu[n], cu[n] + used[n])
        one = slice(n, n + 1)
        want, want_final = ops.causal_conv1d_forward(
            x[None, rows], weight, initial_state=state[one], output_final_state=True, backend=on
        )
        compare.assert_bitwise("y", y[rows], want[0])
        compare.assert_bitwise("final", final[one], want_final)
        alone = ops.causal_conv1d_backward(
            d_y[None, rows], x[None, rows], weight, initial_state=state[one], backend=on
        )
        compare.assert_bitwise("dx", got.dx[rows], alone.dx[0])
        compare.assert_bitwise("dinitial", got.dinitial_state[one], alone.dinitial_state)
        dweight += alone.dweight
    np.testing.assert_allclose(got.dweight, dweight, rtol=1e-13)


@every_backend
def test_convolution_strides_and_poison(on):
    rng = np.random.default_rng(6)
    x, weight, bias, state = draw_conv(rng, np.float32)
    options = dict(activation="silu", backend=on)
    y, _ = ops.causal_conv1d_forward(x, weight, bias=bias, initial_state=state, **options)
    d_y = np.broadcast_to(np.float32(1), y.shape)
    want = ops.causal_conv1d_backward(
        np.ones_like(y), x, weight, bias=bias, initial_state=state, **options
    )
    for change in (poisoned, restrided):
        moved = [change(part, rng) for part in (x, weight)]
        own = dict(bias=change(bias, rng), initial_state=change(state, rng))
        got, _ = ops.causal_conv1d_forward(*moved, **own, **options)
        compare.assert_bitwise("y", got, y)
        gradients = ops.causal_conv1d_backward(d_y, *moved, **own, **options)
        for name, a, b in zip(gradients._fields, gradients, want, strict=True):
            compare.assert_bitwise(name, a, b)


NORMS = {
    "plain": {},
    "weighted": dict(weight=True),
    "silu behind": dict(weight=True, gate=True, activation="silu"),
    "sigmoid behind": dict(gate=True, activation="sigmoid"),
    "silu first": dict(weight=True, gate=True, activation="silu", gate_first=True),
    "groups": dict(weight=True, gate=True, activation="silu", gate_first=True, group_size=4),
    "groups behind": dict(weight=True, gate=True, activation="sigmoid", group_size=2, eps=1e-3),
}


def draw_norm(rng, kind, shape, dtype=np.float64):
    options = dict(NORMS[kind])
    x = rng.standard_normal(shape).astype(dtype)
    tensors = {}
    if options.pop("gate", False):
        tensors["gate"] = rng.standard_normal(shape).astype(dtype)
    if options.pop("weight", False):
        tensors["weight"] = rng.standard_normal(shape[-1:]).astype(dtype)
    return x, tensors, options


@every_backend
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 70, 3, 16), (0, 8)], ids=str)
def test_rms_norm(on, kind, dtype, shape):
    rng = np.random.default_rng(7)
    x, tensors, options = draw_norm(rng, kind, shape, dtype)
    y = ops.rms_norm_gated_forward(x, **tensors, **options, backend=on)
    exact = {name: wide(t) for name, t in tensors.items()}
    assert y.dtype == x.dtype and y.shape == x.shape
    linear_compare.judge("y", y, helpers.rms_norm_gated(wide(x), **exact, **options), dtype)
    d_y = rng.standard_normal(shape).astype(dtype)
    got = ops.rms_norm_gated_backward(d_y, x, **tensors, **options, backend=on)
    want = ops.rms_norm_gated_backward(wide(d_y), wide(x), **exact, **options, backend="reference")
    for name, part, other in zip(got._fields, got, want, strict=True):
        if other is None:
            assert part is None
            continue
        linear_compare.judge(name, part, other, dtype, linear_compare.GRADIENT)


@every_backend
@pytest.mark.parametrize("kind", NORMS)
def test_rms_norm_gradients(on, kind):
    rng = np.random.default_rng(8)
    x, tensors, options = draw_norm(rng, kind, (3, 2, 8))
    d_y = rng.standard_normal(x.shape)
    got = ops.rms_norm_gated_backward(d_y, x, **tensors, **options, backend=on)

    def loss(**changed):
        everything = {"x": x.astype(np.longdouble), **tensors, **changed}
        return (helpers.rms_norm_gated(everything.pop("x"), **everything, **options) * d_y).sum()

    gradients = {name: getattr(got, "d" + name) for name in ("x", *tensors)}
    check_differences(loss, {"x": x, **tensors}, gradients)


@every_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_l2_norm(on, dtype):
    rng = np.random.default_rng(9)
    x = rng.standard_normal((2, 5, 3, 16)).astype(dtype)
    x[0, 0] = 0  # 0 stays 0, and its gradient is finite
    y = ops.l2norm_forward(x, backend=on)
    linear_compare.judge("y", y, helpers.l2norm(wide(x)), dtype)
    assert not y[0, 0].any()
    d_y = rng.standard_normal(x.shape).astype(dtype)
    dx = ops.l2norm_backward(d_y, x, backend=on)
    assert np.isfinite(dx.astype(np.float64)).all() and dx.dtype == x.dtype
    if dtype == np.float64:
        part, d_part = x[:1, :2], d_y[:1, :2]
        want = differences(lambda changed: (helpers.l2norm(changed) * d_part).sum(), part)
        got = ops.l2norm_backward(d_part, part, backend=on)
        np.testing.assert_allclose(got[0, 1], want[0, 1], rtol=1e-8, atol=1e-9)


@every_backend
def test_norm_strides_threads_and_poison(on):
    rng = np.random.default_rng(10)
    x, tensors, options = draw_norm(rng, "silu behind", (3, 50, 2, 8), np.float32)
    d_y = rng.standard_normal(x.shape).astype(np.float32)
    y = ops.rms_norm_gated_forward(x, **tensors, **options, backend=on)
    want = ops.rms_norm_gated_backward(d_y, x, **tensors, **options, backend=on)
    threads = onchip.get_num_threads()
    try:
        for count in (1, 5):
            onchip.set_num_threads(count)
            for change in (poisoned, restrided):
                moved = {name: change(t, rng) for name, t in tensors.items()}
                other = change(x, rng)
                got = ops.rms_norm_gated_forward(other, **moved, **options, backend=on)
                compare.assert_bitwise("y", got, y)
                gradients = ops.rms_norm_gated_backward(
                    change(d_y, rng), other, **moved, **options, backend=on
                )
                for name, a, b in zip(gradients._fields, gradients, want, strict=True):
                    compare.assert_bitwise(name, a, b)
    finally:
        onchip.set_num_threads(threads)


F4 = np.float32
X, W = np.zeros((2, 5, 3), F4), np.zeros((3, 4), F4)

REFUSED = [
    ("causal_conv1d_forward", "x", dict(x=np.zeros((2, 5, 3, 1), F4), weight=W)),
    ("causal_conv1d_forward", "x", dict(x=np.zeros((2, 5, 3), np.int32), weight=W)),
    ("causal_conv1d_forward", "x", dict(x=X, weight=W, cu_seqlens=[0, 5])),
    ("causal_conv1d_forward", "weight", dict(x=X, weight=np.zeros((4, 3), F4))),
    ("causal_conv1d_forward", "weight", dict(x=X, weight=np.zeros((3, 0), F4))),
    ("causal_conv1d_forward", "bias", dict(x=X, weight=W, bias=np.zeros(4, F4))),
    ("causal_conv1d_forward", "activation", dict(x=X, weight=W, activation="sigmoid")),
    ("causal_conv1d_forward", "activation", dict(x=X, weight=W, activation="relu")),
    ("causal_conv1d_forward", "initial_state", dict(x=X, weight=W, initial_state=W)),
    (
        "causal_conv1d_forward",
        "initial_state",
        dict(x=X, weight=W, initial_state=np.zeros((2, 3, 4))),
    ),
    ("causal_conv1d_forward", "seqlens[1]", dict(x=X, weight=W, seqlens=[5, 6])),
    ("causal_conv1d_step", "x", dict(x=X, weight=W, state=np.zeros((2, 3, 4), F4))),
    (
        "causal_conv1d_step",
        "state_indices",
        dict(x=X[0], weight=W, state=np.zeros((2, 3, 4), F4), state_indices=[0, 0, 1, -1, -1]),
    ),
    ("causal_conv1d_step", "state", dict(x=X[0], weight=W, state=np.zeros((2, 3, 4), F4))),
    ("l2norm_forward", "eps", dict(x=X, eps=0.0)),
    ("l2norm_forward", "x", dict(x=np.zeros((), F4))),
    ("rms_norm_gated_forward", "gate", dict(x=X, gate=X[0], activation="silu")),
    ("rms_norm_gated_forward", "weight", dict(x=X, weight=np.zeros(4, F4))),
    ("rms_norm_gated_forward", "activation", dict(x=X, gate=X)),
    ("rms_norm_gated_forward", "gate", dict(x=X, activation="silu")),
    ("rms_norm_gated_forward", "gate_first", dict(x=X, gate_first=True)),
    ("rms_norm_gated_forward", "group_size", dict(x=X, group_size=2)),
    ("rms_norm_gated_forward", "group_size", dict(x=X, group_size=-1)),
    ("rms_norm_gated_forward", "eps", dict(x=X, eps=float("inf"))),
]


@pytest.mark.parametrize(("name", "argument", "call"), REFUSED)
def test_refused(name, argument, call):
    with pytest.raises(onchip.InvalidArgument) as refusal:
        getattr(ops, name)(**call)
    assert str(refusal.value).startswith(f"{name}: {argument}: got "), refusal.value
    assert "wanted" in str(refusal.value)


@pytest.mark.parametrize("activation", ["sigmoid", "relu"])
def test_convolution_names_the_activations_it_has(activation):
    with pytest.raises(onchip.InvalidArgument, match='wanted None or "silu"'):
        ops.causal_conv1d_forward(X, W, activation=activation)


def test_explain():
    text = onchip.explain("causal_conv1d_forward", X, W, output_final_state=True)
    assert text.startswith("causal_conv1d_forward: cpu\n")
    assert onchip.explain("l2norm_backward", X, X).startswith("l2norm_backward: cpu\n")
    text = onchip.explain("rms_norm_gated_forward", onchip.ArraySpec((4, 8), "bfloat16"))
    assert text.startswith("rms_norm_gated_forward: cpu\n")
