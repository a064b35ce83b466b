"""onchip.torch's short convolution and norms on CPU tensors: values and gradients against plain
formulas, states, steps, registration."""

import pytest

import onchip

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402
from torch_cases import draw, same  # noqa: E402

import onchip.torch  # noqa: E402
from onchip.torch import causal_conv1d, causal_conv1d_step, l2norm, rms_norm_gated  # noqa: E402


@pytest.fixture(autouse=True)
def _poisoned_memory():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def wide(*shape, seed):
    return draw(shape, torch.float64, seed).requires_grad_()


def close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def plain_convolution(x, weight, bias, state, activation):
    """[N, T, D] and the last W inputs."""
    known = torch.cat([state.mT, x], 1)
    width = weight.shape[1]
    rows = [bias + (known[:, t + 1 : t + 1 + width] * weight.T).sum(1) for t in range(x.shape[1])]
    y = torch.stack(rows, 1)
    y = y * torch.sigmoid(y) if activation else y
    return y, known[:, x.shape[1] :].mT


def plain_norm(x, gate, weight, gate_first):
    opened = torch.sigmoid(gate)
    y = x * opened if gate_first else x
    groups = [g / (g.square().mean(-1, keepdim=True) + 1e-6).sqrt() for g in y.chunk(2, -1)]
    y = torch.cat(groups, -1) * weight
    return y if gate_first else y * opened


def gradients(results, inputs):
    cotangents = [draw(y.shape, y.dtype, 30 + index) for index, y in enumerate(results)]
    return torch.autograd.grad(results, inputs, cotangents)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_convolution(activation):
    inputs = wide(2, 5, 3, seed=1), wide(3, 4, seed=2), wide(3, seed=3), wide(2, 3, 4, seed=4)
    x, weight, bias, state = inputs
    got = causal_conv1d(
        x,
        weight,
        bias=bias,
        activation=activation,
        initial_state=state,
        output_final_state=True,
    )
    wanted = plain_convolution(*inputs, activation)
    close(got, wanted)
    close(gradients(got, inputs), gradients(wanted, inputs))
    # L21: a loss of the final state alone.
    assert not torch.autograd.grad(
        causal_conv1d(x, weight, initial_state=state, output_final_state=True)[1].sum(),
        inputs,
        allow_unused=True,
        materialize_grads=True,
    )[1].any()


def test_convolution_packed_and_in_steps():
    x, weight = draw((7, 3), torch.float64, 1), draw((3, 4), torch.float64, 2)
    y, final = causal_conv1d(x, weight, cu_seqlens=[0, 2, 2, 7], output_final_state=True)
    assert causal_conv1d(x, weight, cu_seqlens=[0, 2, 2, 7])[1] is None
    for begin, end, row in ((0, 2, 0), (2, 7, 2)):
        state = torch.zeros(4, 3, 4, dtype=torch.float64)
        for t in range(begin, end):
            one = causal_conv1d_step(x[t : t + 1], weight, state=state, state_indices=[3])
            close(one[0], y[t])
        close(state[3], final[row])
        assert not state[:3].any() and not final[1].any()
    weight.requires_grad_()
    with pytest.raises(onchip.Unsupported, match=r"causal_conv1d_step: .* requires grad"):
        causal_conv1d_step(x[:1], weight, state=state[:1])


@pytest.mark.parametrize("gate_first", [False, True])
def test_norms(gate_first):
    x, gate, weight = inputs = wide(3, 6, seed=1), wide(3, 6, seed=2), wide(6, seed=3)
    got = rms_norm_gated(
        x, gate=gate, weight=weight, activation="sigmoid", gate_first=gate_first, group_size=3
    )
    wanted = plain_norm(*inputs, gate_first)
    close(got, wanted)
    close(gradients((got,), inputs), gradients((wanted,), inputs))
    wanted = functional.rms_norm(x, (6,), eps=1e-6)
    close(rms_norm_gated(x), wanted)
    close(gradients((rms_norm_gated(x),), (x,)), gradients((wanted,), (x,)))


def test_l2norm():
    x = wide(2, 3, 5, seed=1)
    got, wanted = l2norm(x), x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    close(got, wanted)
    close(gradients((got,), (x,)), gradients((wanted,), (x,)))
    same(torch.func.grad(lambda y: l2norm(y)[0].sum())(x.detach()),
         torch.autograd.grad(l2norm(x)[0].sum(), x)[0])  # fmt: skip
    with pytest.raises(onchip.Unsupported, match="l2norm has no second derivative"):
        torch.autograd.grad(l2norm(x).sum(), x, create_graph=True)


def test_opcheck():
    x, gate, weight = wide(2, 5, 4, seed=1), wide(2, 5, 4, seed=2), wide(4, seed=3)
    operators = torch.ops.onchip
    torch.library.opcheck(operators.l2norm_forward, (x, 1e-6, None))
    torch.library.opcheck(
        operators.rms_norm_gated_forward, (x, gate, weight, "silu", False, None, 1e-6, None)
    )
    taps, state = wide(4, 3, seed=4), wide(2, 4, 3, seed=5)
    torch.library.opcheck(
        operators.causal_conv1d_forward, (x, taps, weight, state, None, None, "silu", None, True)
    )
    torch.library.opcheck(
        operators.causal_conv1d_step,
        (x[:, 0].detach(), taps.detach(), None, state.detach(), None, "silu", None),
    )


def block(x, taps, gate, state):
    y, final = causal_conv1d(
        l2norm(x), taps, activation="silu", initial_state=state, output_final_state=True
    )
    return rms_norm_gated(y, gate=gate, activation="silu"), final


def test_compiled():
    torch._dynamo.reset()
    inputs = wide(2, 5, 4, seed=1), wide(4, 3, seed=2), wide(2, 5, 4, seed=3), wide(2, 4, 3, seed=4)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=False)
    got, wanted = compiled(*inputs), block(*inputs)
    close(got, wanted)
    close(gradients(got, inputs), gradients(wanted, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(dtype):
    x, taps = draw((2, 5, 4), dtype, 1), draw((4, 3), torch.float32, 2)
    y, final = causal_conv1d(x, taps, output_final_state=True)
    same(y, onchip.ops.causal_conv1d_forward(x, taps)[0])
    assert y.dtype == final.dtype == dtype
    same(l2norm(x), onchip.ops.l2norm_forward(x))
    same(rms_norm_gated(x), onchip.ops.rms_norm_gated_forward(x))
