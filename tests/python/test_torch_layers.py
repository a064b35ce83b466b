"""The recurrent layers of onchip.torch.nn on CPU tensors: against their formulas written as loops,
in every way to cut sequences, and what they start from."""

import itertools
import math

import pytest

import onchip

torch = pytest.importorskip("torch")
from torch_cases import draw, same  # noqa: E402

from onchip.torch import nn  # noqa: E402
from onchip.torch.nn._recurrent import Rows, ShortConvolution  # noqa: E402

DIM = 16


def gated_delta_net(**more):
    return nn.GatedDeltaNet(DIM, 2, 4, num_heads_v=4, **more)


def mamba2(**more):
    return nn.Mamba2(DIM, state_dim=8, head_dim=8, num_groups=2, **more)


def mlstm(**more):
    return nn.MLSTM(DIM, 2, **more)


def retnet(**more):
    return nn.RetNet(DIM, 2, **more)


LAYERS = dict(gated_delta_net=gated_delta_net, mamba2=mamba2, mlstm=mlstm, retnet=retnet)


@pytest.fixture(params=LAYERS)
def make(request):
    """A layer in float64, with gates that matter."""

    def made(**more):
        torch.manual_seed(3)
        layer = LAYERS[request.param](**({"dtype": torch.float64} | more))
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                if "gate_preact" in name:
                    parameter.normal_()
        return layer

    made.name = request.param
    return made


def close(got, wanted, tolerance=1e-10):
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


# ---- formulas, one token after the other ---------------------------------------------------------


def convolved(x, convolution):
    """[T, channels]: every tap by itself."""
    weight, rows = convolution.weight[:, 0], []
    width = weight.shape[1]
    for t in range(x.shape[0]):
        y = torch.zeros_like(x[0]) if convolution.bias is None else convolution.bias.clone()
        for back in range(min(t + 1, width)):
            y = y + weight[:, width - 1 - back] * x[t - back]
        rows.append(y * torch.sigmoid(y))
    return torch.stack(rows)


def softplus(x):
    return torch.log1p(x.exp())


def silu(x):
    return x * torch.sigmoid(x)


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def plain_gated_delta_net(layer, x):
    q = convolved(x @ layer.q_proj.weight.T, layer.q_conv1d).reshape(-1, 2, 4)
    k = convolved(x @ layer.k_proj.weight.T, layer.k_conv1d).reshape(-1, 2, 4)
    v = convolved(x @ layer.v_proj.weight.T, layer.v_conv1d).reshape(-1, 4, 8)
    decay = torch.exp(-layer.A_log.exp() * softplus(x @ layer.a_proj.weight.T + layer.dt_bias))
    beta = torch.sigmoid(x @ layer.b_proj.weight.T) * (2 if layer.allow_neg_eigval else 1)
    gate = (x @ layer.g_proj.weight.T).reshape(-1, 4, 8)
    state, rows = x.new_zeros(4, 4, 8), []
    for t in range(x.shape[0]):
        heads = []
        states = []
        for h in range(4):
            key, query = unit(k[t, h // 2]), unit(q[t, h // 2])
            s = decay[t, h] * state[h]
            s = s + beta[t, h] * torch.outer(key, v[t, h] - s.T @ key)
            states.append(s)
            o = s.T @ query / 2
            o = o / (o.square().mean() + 1e-5).sqrt() * layer.o_norm.weight
            heads.append(o * silu(gate[t, h]))
        state = torch.stack(states)
        rows.append(torch.cat(heads))
    return torch.stack(rows) @ layer.o_proj.weight.T


def plain_mamba2(layer, x):
    inner = layer.in_proj(x)
    z, conv, dt = inner[:, :32], inner[:, 32:96], inner[:, 96:]
    conv = convolved(conv, layer.conv1d)
    u, b, c = conv[:, :32].reshape(-1, 4, 8), conv[:, 32:48], conv[:, 48:]
    b, c = b.reshape(-1, 2, 8), c.reshape(-1, 2, 8)
    dt = softplus(dt + layer.dt_bias)
    state, rows = x.new_zeros(4, 8, 8), []
    for t in range(x.shape[0]):
        states, heads = [], []
        for h in range(4):
            s = torch.exp(-dt[t, h] * layer.A_log[h].exp()) * state[h]
            s = s + dt[t, h] * torch.outer(u[t, h], b[t, h // 2])
            states.append(s)
            heads.append(s @ c[t, h // 2] + layer.D[h] * u[t, h])
        state = torch.stack(states)
        y = torch.cat(heads) * silu(z[t])
        groups = [part / (part.square().mean() + 1e-5).sqrt() for part in y.split(16)]
        rows.append(torch.cat(groups) * layer.norm.weight)
    return torch.stack(rows) @ layer.out_proj.weight.T


def plain_mlstm(layer, x):
    q, k, v = layer.q(x), layer.k(x), layer.v(x)
    i = 15 * torch.tanh(layer.igate_preact(x) / 15)
    f = 15 * torch.tanh(layer.fgate_preact(x) / 15)
    rows = []
    for head in range(2):
        keys, values = slice(4 * head, 4 * head + 4), slice(8 * head, 8 * head + 8)
        c, n, m = x.new_zeros(4, 8), x.new_zeros(4), x.new_zeros(())
        one = []
        for t in range(x.shape[0]):
            log_f = -softplus(-f[t, head])
            last, m = m, torch.maximum(log_f + m, i[t, head])
            kept, write = torch.exp(log_f + last - m), torch.exp(i[t, head] - m)
            c = kept * c + write * torch.outer(k[t, keys], v[t, values])
            n = kept * n + write * k[t, keys]
            query = q[t, keys] / 2
            h = c.T @ query / (torch.maximum((n @ query).abs(), torch.exp(-m)) + 1e-6)
            one.append((h - h.mean()) / (h.var(unbiased=False) + 1e-6).sqrt())
        rows.append(torch.stack(one))
    h = torch.cat(rows, -1) * layer.multihead_norm.weight
    return layer.out_proj(torch.sigmoid(layer.ogate_preact(x)) * h)


def plain_retnet(layer, x):
    q, k, v = (p(x).reshape(x.shape[0], 2, -1) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    rows = []
    for head in range(2):
        gamma = 1 - 2.0 ** (-5 - head)
        one = []
        for t in range(x.shape[0]):
            o = x.new_zeros(16)
            for s in range(t + 1):
                score = x.new_zeros(())
                for pair in range(4):
                    # A complex pair turned by position times its frequency.
                    angle = (t - s) * 10000.0 ** -(pair / 3)
                    qe, qo = q[t, head, 2 * pair : 2 * pair + 2]
                    ke, ko = k[s, head, 2 * pair : 2 * pair + 2]
                    score = score + math.cos(angle) * (qe * ke + qo * ko)
                    score = score + math.sin(angle) * (qo * ke - qe * ko) * -1
                o = o + gamma ** (t - s) * score * 8**-0.5 * v[s, head]
            one.append(o / (o.square().mean() + 1e-6).sqrt())
        rows.append(torch.stack(one))
    return layer.out_proj(silu(layer.g_proj(x)) * torch.cat(rows, -1))


PLAIN = dict(
    gated_delta_net=plain_gated_delta_net,
    mamba2=plain_mamba2,
    mlstm=plain_mlstm,
    retnet=plain_retnet,
)


def with_gradients(layer, function, x):
    x = x.clone().requires_grad_()
    y = function(x)
    wanted = [x, *layer.parameters()]
    return y.detach(), *torch.autograd.grad((y * draw(y.shape, y.dtype, 9)).sum(), wanted)


def test_equal_their_formulas(make):
    layer = make()
    x = draw((7, DIM), torch.float64, 1)
    got = with_gradients(layer, lambda x: layer(x[None])[0], x)
    wanted = with_gradients(layer, lambda x: PLAIN[make.name](layer, x), x)
    # The stabiliser is a constant to the operator: with eps = 1e-6 beside it, so much of gradients.
    for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
        close(one, other, 2e-6 if make.name == "mlstm" and index else 1e-9)


def test_gated_delta_net_with_negative_eigenvalues():
    torch.manual_seed(0)
    layer = gated_delta_net(allow_neg_eigval=True, conv_bias=True, dtype=torch.float64)
    x = draw((5, DIM), torch.float64, 1)
    close(layer(x[None])[0], plain_gated_delta_net(layer, x))


# ---- sequences in pieces -------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(0, 1), (0, 2), (0, 3, 4), (0, 8), (0, 0, 5, 9), (0, 1, 2, 3)])
def test_prefill_and_steps(make, cuts):
    """L17: a prompt of fewer tokens than the convolution sees too; pieces, then a token each."""
    layer, x = make(), draw((2, 9, DIM), torch.float64, 2)
    wanted = layer(x)
    state, rows = layer.new_state(2), []
    with torch.no_grad():
        for begin, end in itertools.pairwise(cuts):
            rows.append(layer(x[:, begin:end], state=state))
        tensors = state.tensors()
        for t in range(cuts[-1], 9):
            rows.append(layer(x[:, t : t + 1], state=state))
    close(torch.cat(rows, 1), wanted)
    assert state.seen.tolist() == [9, 9]
    assert all(a is b for a, b in zip(state.tensors(), tensors, strict=True))


def test_a_state_that_was_saved_goes_on(make, tmp_path):
    layer, x = make(), draw((2, 5, DIM), torch.float64, 2)
    state = layer.new_state(2)
    with torch.no_grad():
        layer(x[:, :3], state=state)
        torch.save(state, tmp_path / "state.pt")
        wanted = layer(x[:, 3:], state=state)
        close(layer(x[:, 3:], state=torch.load(tmp_path / "state.pt")), wanted)


@pytest.mark.parametrize("cut", [0, 1, 3, 6])
def test_gradients_through_the_carried_state(make, cut):
    layer, x = make(), draw((2, 6, DIM), torch.float64, 2)

    def in_two(x):
        state = layer.new_state(2)
        return torch.cat([layer(x[:, :cut], state=state), layer(x[:, cut:], state=state)], 1)

    for one, other in zip(
        with_gradients(layer, in_two, x), with_gradients(layer, layer, x), strict=True
    ):
        close(one, other, 1e-9)


def test_a_detached_state_ends_the_history(make):
    layer, x = make(), draw((2, 6, DIM), torch.float64, 2).requires_grad_()
    state = layer.new_state(2)
    layer(x[:, :3], state=state)
    (gradient,) = torch.autograd.grad(layer(x[:, 3:], state=state.detach()).sum(), x)
    assert not gradient[:, :3].any() and gradient[:, 3:].any()


def test_packed_sequences_are_each_alone(make):
    """L31: forward and gradients; an empty sequence, and rows that belong to none."""
    layer = make()
    x = draw((12, DIM), torch.float64, 4)
    cuts = [0, 1, 1, 8, 10]

    def alone(x):
        pieces = [layer(x[None, a:b])[0] for a, b in itertools.pairwise(cuts)]
        return torch.cat([*pieces, x.new_zeros(2, DIM)])

    for cu_seqlens in (cuts, torch.tensor(cuts), torch.tensor(cuts, dtype=torch.int32)):
        got = with_gradients(layer, lambda x, cu=cu_seqlens: layer(x, cu_seqlens=cu), x)
        for one, other in zip(got, with_gradients(layer, alone, x), strict=True):
            close(one, other, 1e-9)


def test_packed_prefill_then_steps(make):
    layer = make()
    lengths = [1, 0, 7, 2]
    sequences = [draw((length + 2, DIM), torch.float64, length) for length in lengths]
    wanted = [layer(x[None])[0] for x in sequences]
    prompt = torch.cat([x[:-2] for x in sequences])
    state = layer.new_state(4)
    with torch.no_grad():
        first = layer(prompt, state=state, cu_seqlens=[0, 1, 1, 8, 10])
        close(first, torch.cat([y[:-2] for y in wanted]))
        assert state.seen.tolist() == lengths
        # Another batch: fewer, in another order.
        state = state.select([3, 0, 2])
        for back in (2, 1):
            token = torch.stack([sequences[n][-back] for n in (3, 0, 2)])[:, None]
            y = layer(token, state=state)[:, 0]
            close(y, torch.stack([wanted[n][-back] for n in (3, 0, 2)]))


@pytest.mark.parametrize("packed", [False, True])
def test_unused_rows_reach_nothing(make, packed):
    layer, lengths = make(), [3, 0, 5]
    x = draw((3, 6, DIM), torch.float64, 5)
    wanted = [layer(x[n : n + 1, :length])[0] for n, length in enumerate(lengths)]
    after = [draw((1, 1, DIM), torch.float64, 6 + n) for n in range(3)]
    poisoned = x.clone()
    for n, length in enumerate(lengths):
        poisoned[n, length:] = float("nan")
    options = dict(seqlens=lengths)
    if packed:
        poisoned = poisoned.flatten(0, 1)
        options["cu_seqlens"] = [0, 6, 12, 18]
    poisoned.requires_grad_()
    y = layer(poisoned, **options)
    y.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
    assert poisoned.grad.isfinite().all()
    state = layer.new_state(3)
    with torch.no_grad():
        same(layer(poisoned, state=state, **options), y.detach())
        last = layer(torch.cat(after), state=state)
    y = y.detach().reshape(3, 6, DIM)
    for n, length in enumerate(lengths):
        close(y[n, :length], wanted[n])
        assert not y[n, length:].any()
        close(last[n], layer(torch.cat([x[n : n + 1, :length], after[n]], 1))[0, -1:])


# ---- the short convolution -----------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_the_convolutions_last_inputs(length, packed):
    """L21: with a loss on the last inputs alone each row gets its own, and those of the call before
    keep what the call left them."""
    convolution = ShortConvolution(3, 4, False, dtype=torch.float64)
    x = draw((length, 3), torch.float64, 1).requires_grad_()
    before = draw((1, 3, 4), torch.float64, 2).requires_grad_()
    given = x if packed else x[None]
    rows = Rows("layer", given, None, [0, length] if packed else None, None)
    _, last = convolution(given, rows, before)
    assert last.shape == (1, 3, 4)
    cotangent = draw(last.shape, torch.float64, 3)
    dx, d_before = torch.autograd.grad(
        (last * cotangent).sum(), (x, before), materialize_grads=True
    )
    joined = torch.cat([d_before[0], dx.T], -1)
    assert not joined[:, :length].any()
    same(joined[:, length:], cotangent[0])


def test_the_convolution_in_any_layout_of_its_cotangent():
    """L22."""
    convolution = ShortConvolution(4, 4, True, dtype=torch.float64)
    x = draw((2, 6, 4), torch.float64, 1).requires_grad_()
    before = draw((2, 4, 4), torch.float64, 2).requires_grad_()
    inputs = (x, before, *convolution.parameters())

    def of(loss):
        y, _ = convolution(x, Rows("layer", x, None, None, None), before)
        return torch.autograd.grad(loss(y), inputs)

    weights = draw((2, 6, 4), torch.float64, 3)
    wanted = of(lambda y: (y * weights).sum())
    for one, other in zip(
        of(lambda y: (torch.cat([y, y.detach()], -1) * torch.cat([weights] * 2, -1)).sum()),
        wanted,
        strict=True,
    ):
        same(one, other)
    for one, other in zip(
        of(lambda y: y.sum()), of(lambda y: (y * torch.ones_like(y)).sum()), strict=True
    ):
        close(one, other)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("gate_first", [False, True])
def test_gated_norm(groups, gate_first):
    """L15: with several groups, gradients too."""
    norm = nn.GatedRMSNorm(6, group_size=6 // groups, gate_first=gate_first, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(draw((6,), torch.float64, 1))
    x, gate = (draw((3, 6), torch.float64, seed).requires_grad_() for seed in (2, 3))

    def plain(x, gate, weight):
        y = x * silu(gate) if gate_first else x
        parts = [p / (p.square().mean(-1, keepdim=True) + 1e-5).sqrt() for p in y.chunk(groups, -1)]
        y = torch.cat(parts, -1) * weight
        return y if gate_first else y * silu(gate)

    close(norm(x, gate), plain(x, gate, norm.weight))
    assert torch.autograd.gradcheck(norm, (x, gate))
    assert norm(x.bfloat16(), gate).dtype == torch.bfloat16


# ---- what they start from, dtypes, compilers -----------------------------------------------------

NAMES = dict(
    gated_delta_net="A_log dt_bias q_proj.weight k_proj.weight v_proj.weight a_proj.weight "
    "b_proj.weight q_conv1d.weight k_conv1d.weight v_conv1d.weight g_proj.weight o_norm.weight "
    "o_proj.weight",
    mamba2="dt_bias A_log D in_proj.weight conv1d.weight conv1d.bias norm.weight out_proj.weight",
    mlstm="q.weight k.weight v.weight ogate_preact.weight igate_preact.weight igate_preact.bias "
    "fgate_preact.weight fgate_preact.bias multihead_norm.weight out_proj.weight",
    retnet="q_proj.weight k_proj.weight v_proj.weight g_proj.weight out_proj.weight",
)


def test_parameters_have_their_published_names(make):
    layer = make()
    assert sorted(layer.state_dict()) == sorted(NAMES[make.name].split())
    loaded = LAYERS[make.name](dtype=torch.float64)
    loaded.load_state_dict(layer.state_dict())
    x = draw((1, 4, DIM), torch.float64, 1)
    same(loaded(x), layer(x))


def test_first_values():
    torch.manual_seed(0)
    layer = nn.GatedDeltaNet(32, 512, 1)
    rate, step = layer.A_log.exp(), torch.nn.functional.softplus(layer.dt_bias)
    assert 0 < rate.min() < 0.2 and 15.8 < rate.max() <= 16 and 7.3 < rate.mean() < 8.7
    assert 1e-3 * 0.999 < step.min() < 1.1e-3 and 0.09 < step.max() < 0.1 * 1.001
    assert abs(step.log().mean() - math.log(1e-2)) < 0.2
    layer = nn.Mamba2(256, head_dim=1)
    rate, step = layer.A_log.exp(), torch.nn.functional.softplus(layer.dt_bias)
    assert 1 <= rate.min() < 1.2 and 15.8 < rate.max() < 16 and (layer.D == 1).all()
    assert 1e-3 * 0.999 < step.min() < 1.1e-3 and 0.09 < step.max() < 0.1 * 1.001
    layer = nn.MLSTM(256, 4, num_blocks=8)
    assert (layer.igate_preact.bias == -10).all() and not layer.igate_preact.weight.any()
    assert layer.fgate_preact.bias.tolist() == [3, 4, 5, 6] and not layer.fgate_preact.weight.any()
    assert abs(layer.q.weight.std() / (2 / 5 / 256) ** 0.5 - 1) < 0.05
    assert abs(layer.out_proj.weight.std() / (2 / 8 / 16) - 1) < 0.05
    layer = nn.RetNet(256, 2)
    assert abs(layer.v_proj.weight.abs().max() / (2**-2.5 * (6 / 768) ** 0.5) - 1) < 0.01
    assert abs(layer.out_proj.weight.abs().max() / (2**-1 * (6 / 768) ** 0.5) - 1) < 0.01


def test_what_decides_memory_is_wide_and_marked():
    for layer in (gated_delta_net(dtype=torch.bfloat16), mamba2(dtype=torch.bfloat16)):
        marked = {name for name, x in layer.named_parameters() if hasattr(x, "_no_weight_decay")}
        assert marked == {"A_log", "dt_bias"} | ({"D"} if isinstance(layer, nn.Mamba2) else set())
        wide = {name for name, x in layer.named_parameters() if x.dtype == torch.float32}
        assert wide == marked


@pytest.mark.parametrize("way", ["bfloat16", "autocast"])
def test_narrow_dtypes(make, way):
    exact = make(dtype=torch.float32)
    layer = make(dtype=torch.bfloat16 if way == "bfloat16" else torch.float32)
    layer.load_state_dict(exact.state_dict())
    x = draw((2, 9, DIM), torch.float32, 1)
    wanted = exact(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        given = x.bfloat16() if way == "bfloat16" else x
        y = layer(given)
        state = layer.new_state(2)
        with torch.no_grad():
            rows = [layer(given[:, :5], state=state)]
            rows += [layer(given[:, t : t + 1], state=state) for t in range(5, 9)]
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)
    for got in (y, torch.cat(rows, 1)):
        assert (got.float() - wanted).norm() < 0.05 * wanted.norm()


def test_compiled(make):
    torch._dynamo.reset()
    layer, x = make(), draw((2, 6, DIM), torch.float64, 1)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
    for one, other in zip(
        with_gradients(layer, compiled, x), with_gradients(layer, layer, x), strict=True
    ):
        close(one, other)


def test_a_compiled_step(make):
    torch._dynamo.reset()
    layer, x = make(), draw((2, 4, DIM), torch.float64, 1)
    wanted, state = layer(x), layer.new_state(2)
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
        rows = [compiled(x[:, t : t + 1], state=state) for t in range(4)]
    close(torch.cat(rows, 1), wanted)


def test_refusals(make):
    layer = make()
    x = torch.zeros(2, 3, DIM, dtype=torch.float64)
    name = type(layer).__name__
    with pytest.raises(onchip.InvalidArgument, match=rf"{name}: x: got shape \(2, 3, 16\)"):
        layer(x, cu_seqlens=[0, 3])
    with pytest.raises(onchip.InvalidArgument, match=rf"{name}: x: got shape \(3, 16\)"):
        layer(x[0])
    with pytest.raises(onchip.InvalidArgument, match=rf"{name}: state: got one of 3 sequences"):
        layer(x, state=layer.new_state(3))
    with pytest.raises(onchip.InvalidArgument, match="backend"):
        LAYERS[make.name](dtype=torch.float64, backend="gpu")(x)
    assert "num_heads=" in repr(layer)


def test_refused_sizes():
    for wrong, words in (
        (lambda: nn.GatedDeltaNet(16, 3, 4, num_heads_v=4), "GatedDeltaNet: num_heads_v: got 4"),
        (lambda: nn.GatedDeltaNet(16, 2, 4, conv_size=0), "GatedDeltaNet: conv_size: got 0"),
        (lambda: nn.Mamba2(16, head_dim=5), "Mamba2: head_dim: got 5"),
        (lambda: nn.Mamba2(16, head_dim=8, num_groups=3), "Mamba2: num_groups: got 3"),
        (lambda: nn.MLSTM(16, 3), "MLSTM: qk_dim_factor: got 0.5, 8 channels with 3 heads"),
        (lambda: nn.RetNet(12, 4), "RetNet: num_heads: got 4 with embed_dim 12"),
    ):
        with pytest.raises(onchip.InvalidArgument, match=words):
            wrong()
