"""onchip.torch.nn on CPU tensors."""

import copy

import pytest

import onchip

torch = pytest.importorskip("torch")
from torch_cases import draw, same  # noqa: E402

import onchip.torch  # noqa: E402
from onchip.torch.nn import Attention  # noqa: E402


@pytest.fixture(autouse=True)
def _poisoned_memory():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def made(*arguments, seed=0, **options):
    torch.manual_seed(seed)
    return Attention(*arguments, dtype=torch.float64, **options)


def test_the_names_of_its_parameters():
    names = {
        f"{part}_proj.{kind}" for part in ("q", "k", "v", "out") for kind in ("weight", "bias")
    }
    layer = made(24, 6, 2, kv_dim=10)
    assert set(layer.state_dict()) == names
    shapes = {name: tuple(x.shape) for name, x in layer.state_dict().items() if "weight" in name}
    assert shapes == {
        "q_proj.weight": (24, 24),
        "k_proj.weight": (8, 10),
        "v_proj.weight": (8, 10),
        "out_proj.weight": (24, 24),
    }
    without = made(24, 6, bias=False, head_dim=5)
    assert set(without.state_dict()) == {name for name in names if "weight" in name}
    assert without.out_proj.weight.shape == (24, 30)


@pytest.mark.parametrize("causal", [False, True])
def test_equals_torchs_own_layer(causal):
    """With its weights, forward and every gradient."""
    torch.manual_seed(1)
    theirs = torch.nn.MultiheadAttention(24, 6, batch_first=True, dtype=torch.float64)
    ours = made(24, 6, causal=causal)
    with torch.no_grad():
        for part, weight, bias in zip(
            "qkv", theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True
        ):
            projection = getattr(ours, f"{part}_proj")
            projection.weight.copy_(weight)
            projection.bias.copy_(bias)
        ours.out_proj.load_state_dict(theirs.out_proj.state_dict())
    x = draw((2, 11, 24), torch.float64, 2)
    hidden = torch.ones(11, 11, dtype=torch.bool).triu(1) if causal else None
    results = []
    for call in (ours, lambda y: theirs(y, y, y, attn_mask=hidden, need_weights=False)[0]):
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        y.backward(draw(y.shape, y.dtype, 3))
        results.append((y.detach(), leaf.grad))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)
    stacked = torch.cat([getattr(ours, f"{part}_proj").weight.grad for part in "qkv"])
    torch.testing.assert_close(stacked, theirs.in_proj_weight.grad, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(ours.out_proj.weight.grad, theirs.out_proj.weight.grad)


def test_grouped_heads_of_another_sequence():
    layer = made(24, 6, 2, kv_dim=10, window=(5, 3), softcap=2.0, scale=0.4)
    x, context = draw((2, 7, 24), torch.float64, 1), draw((2, 9, 10), torch.float64, 2)
    mask, bias = draw((2, 1, 7, 9), seed=3) > -1, draw((1, 6, 7, 9), torch.float64, 4)
    q = layer.q_proj(x).view(2, 7, 6, 4)
    k, v = (p(context).view(2, 9, 2, 4) for p in (layer.k_proj, layer.v_proj))
    o = onchip.torch.attention(
        q, k, v, window=(5, 3), softcap=2.0, scale=0.4, mask=mask, bias=bias, seqlens_kv=[9, 4]
    )
    got = layer(x, context, mask=mask, bias=bias, seqlens_kv=[9, 4])
    same(got, layer.out_proj(o.reshape(2, 7, 24)))


def test_packed_sequences_are_each_alone():
    layer = made(16, 4, causal=True)
    x = draw((13, 16), torch.float64, 1)
    got = layer(x, cu_seqlens_q=[0, 5, 5, 13])
    wanted = torch.cat([layer(x[None, :5])[0], layer(x[None, 5:])[0]])
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)


def test_dropout_in_training_alone():
    layer, x = made(16, 4, dropout_p=0.5), draw((2, 9, 16), torch.float64, 1)
    without = made(16, 4)
    without.load_state_dict(layer.state_dict())
    torch.manual_seed(1)
    first, second = layer(x), layer(x)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    same(layer(x), first)
    layer.eval()
    same(layer(x), without(x))
    layer.train()
    assert not torch.equal(layer(x), without(x))


def test_gradients_of_every_parameter():
    layer = made(8, 2, 1, causal=True)
    x = draw((1, 5, 8), torch.float64, 1).requires_grad_()
    names = [name for name, _ in layer.named_parameters()]

    def function(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, (x, *layer.parameters()))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    torch._dynamo.reset()
    layer = made(16, 4, 2, causal=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (5, 8):
        x = draw((2, length, 16), torch.float64, length)
        results = []
        for call in (compiled, layer):
            layer.zero_grad()
            leaf = x.clone().requires_grad_()
            y = call(leaf)
            y.square().sum().backward()
            results.append([y.detach(), leaf.grad, *(p.grad.clone() for p in layer.parameters())])
        for got, wanted in zip(*results, strict=True):
            torch.testing.assert_close(got, wanted)


def test_moved_copied_and_described():
    layer = made(16, 4, 2, causal=True, window=(3, 0), dropout_p=0.1).eval()
    x = draw((1, 6, 16), torch.float32, 1)
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert half(x.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.float()(x).dtype == torch.bfloat16
    text = repr(layer)
    for words in ("num_heads=4", "num_kv_heads=2", "head_dim=4", "causal=True", "window=(3, 0)"):
        assert words in text
    assert "dropout_p=0.1" in text


def test_refusals():
    for arguments, options, words in (
        ((24, 6, 4), {}, "num_kv_heads: got 4"),
        ((24, 0), {}, "num_heads: got 0"),
        ((25, 6), {}, "embed_dim: got 25"),
        ((24, 6), dict(dropout_p=1.0), "dropout_p: got 1.0"),
    ):
        with pytest.raises(onchip.InvalidArgument, match=words):
            Attention(*arguments, **options)
