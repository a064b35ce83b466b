"""scaled_dot_product_attention beside torch.nn.functional's own, on CPU tensors, and what people
have reported of attention in PyTorch."""

import inspect

import pytest

import onchip

torch = pytest.importorskip("torch")
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_cases import DTYPES, draw, same  # noqa: E402

import onchip.torch  # noqa: E402
from onchip.torch import attention, scaled_dot_product_attention  # noqa: E402

F = torch.nn.functional
INF = float("inf")
# One unit in the last place of the largest value, and as much again: both sides round once.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _poisoned_memory():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(q, k, v, dtype=torch.float64):
    return [draw(shape, dtype, seed) for seed, shape in enumerate((q, k, v))]


def gradients(function, tensors, **options):
    """The result, and the gradient of everything that can have one, under a fixed cotangent."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        options["attn_mask"] = mask.detach().clone().requires_grad_()
        leaves.append(options["attn_mask"])
    o = function(*leaves[:3], **options)
    return o.detach(), *torch.autograd.grad(o, leaves, draw(o.shape, o.dtype, 30))


def equal_torchs_own(tensors, **options):
    got = gradients(scaled_dot_product_attention, tensors, **options)
    wanted = gradients(F.scaled_dot_product_attention, tensors, **options)
    for one, other in zip(got, wanted, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    return got


def test_the_signature_is_torchs():
    theirs = F.scaled_dot_product_attention.__doc__
    for parameter in inspect.signature(scaled_dot_product_attention).parameters.values():
        default = "" if parameter.default is parameter.empty else f"={parameter.default}"
        assert f"{parameter.name}{default}" in theirs, parameter


SHAPES = {
    "rank 4": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)),
    "rank 3": ((3, 5, 8), (3, 7, 8), (3, 7, 6)),
    "rank 2": ((5, 8), (7, 8), (7, 6)),
    "rank 5": ((2, 4, 3, 5, 8), (2, 4, 3, 7, 8), (2, 4, 3, 7, 6)),
    "rank 6": ((2, 1, 4, 3, 5, 8), (2, 2, 4, 3, 7, 8), (2, 2, 1, 3, 7, 6)),
    "keys of one batch": ((2, 3, 5, 8), (1, 3, 7, 8), (1, 3, 7, 6)),
    "keys of one head": ((2, 3, 5, 8), (2, 1, 7, 8), (2, 1, 7, 6)),
    "queries of one head": ((2, 1, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)),
    "ranks mixed": ((2, 3, 5, 8), (3, 7, 8), (7, 6)),
    "more queries": ((2, 3, 7, 8), (2, 3, 5, 8), (2, 3, 5, 6)),
    "no keys": ((2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 6)),
    "no queries": ((2, 3, 0, 8), (2, 3, 5, 8), (2, 3, 5, 6)),
    "no batch": ((0, 3, 5, 8), (0, 3, 4, 8), (0, 3, 4, 6)),
    "one token": ((1, 1, 1, 16),) * 3,
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_every_rank_and_broadcast(name, is_causal):
    """A02, A10: is_causal is top-left, whatever the lengths; zero sizes are legal."""
    equal_torchs_own(inputs(*SHAPES[name]), is_causal=is_causal)


@pytest.mark.parametrize(
    "shape", [(5, 7), (1, 7), (5, 1), (3, 5, 7), (2, 1, 5, 7), (1, 3, 1, 7), (2, 3, 5, 7)]
)
@pytest.mark.parametrize("kind", ["bool", "float64", "float32"])
def test_every_mask_that_broadcasts(shape, kind):
    """A42, and A41 for its gradient."""
    tensors = inputs(*SHAPES["rank 4"])
    mask = draw(shape, torch.float64, 9)
    if kind == "bool":
        mask = mask > -0.5
    elif kind == "float32":
        # Torch's own sums the gradient in float32; the comparison is not about that.
        got = scaled_dot_product_attention(*tensors, mask.float())
        wanted = F.scaled_dot_product_attention(*tensors, mask.float())
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
        return
    equal_torchs_own(tensors, attn_mask=mask)
    if len(shape) < 4:
        equal_torchs_own(inputs(*SHAPES["rank 3"]), attn_mask=mask)


def test_a_mask_of_rank_5():
    for shape in ((2, 1, 3, 1, 7), (1, 1, 1, 5, 7), (2, 4, 3, 5, 7), (4, 3, 5, 7), (4, 1, 1, 7)):
        tensors = inputs(*SHAPES["rank 5"])
        equal_torchs_own(tensors, attn_mask=draw(shape, torch.float64, 9))
        equal_torchs_own(tensors, attn_mask=draw(shape, torch.float64, 9) > 0)


@pytest.mark.parametrize("leading", [(2,), (), (2, 2)])
def test_grouped_heads(leading):
    shapes = [(*leading, *shape) for shape in ((6, 5, 8), (3, 7, 8), (3, 7, 6))]
    equal_torchs_own(inputs(*shapes), enable_gqa=True)
    with pytest.raises(onchip.InvalidArgument, match="leading axes"):
        scaled_dot_product_attention(*inputs(*shapes))


@pytest.mark.parametrize("scale", [None, 0.3, 2, -1.0, 0.0])
def test_scale(scale):
    equal_torchs_own(inputs(*SHAPES["rank 4"]), scale=scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype):
    tensors = inputs((2, 3, 40, 32), (2, 3, 50, 32), (2, 3, 50, 32), dtype)
    got = scaled_dot_product_attention(*tensors, is_causal=True)
    wanted = F.scaled_dot_product_attention(*(x.double() for x in tensors), is_causal=True)
    assert got.dtype == dtype
    error = (got.double() - wanted).abs().max()
    assert error <= TOLERANCE[dtype] * wanted.abs().max()


def test_nothing_is_copied(monkeypatch):
    """Views of torch's layout, of one projection, and of broadcast keys and masks."""
    qkv = draw((2, 9, 3, 4, 16), torch.float32, 1).permute(2, 0, 3, 1, 4)
    q, k, v = qkv
    masks = [draw((9, 9), seed=2), draw((2, 1, 1, 9), seed=3) > 0]
    addresses = {x.data_ptr() for x in (q, k, v, *masks)}
    seen = []
    forward = onchip.torch._run._FORWARD

    class Recorded:
        def run(self, inputs, *rest):
            seen.extend(x.data_ptr() in addresses for x in inputs if x is not None)
            # True: the library has taken the memory as it is.
            seen.append(forward.run(inputs, *rest))
            return seen[-1]

    monkeypatch.setattr(onchip.torch._run, "_FORWARD", Recorded())
    scaled_dot_product_attention(q, k, v, masks[0])
    scaled_dot_product_attention(q, k[:1], v[:1], masks[1])
    assert seen == [True] * 10


def test_the_result_is_laid_out_for_the_next_projection():
    o = scaled_dot_product_attention(*inputs(*SHAPES["rank 4"]))
    merged = o.transpose(1, 2).flatten(-2)
    assert merged.data_ptr() == o.data_ptr()


def test_refusals():
    q, k, v = inputs(*SHAPES["rank 4"])
    mask = torch.ones(5, 7, dtype=torch.bool)
    nested = torch.nested.nested_tensor([draw((3, 4)), draw((5, 4))], layout=torch.jagged)
    refused = [
        (dict(attn_mask=mask, is_causal=True), "is_causal: got True beside attn_mask"),
        (dict(attn_mask=mask.long()), "bias: got int64"),
        (dict(attn_mask=mask[:, :6]), "mask: got shape"),
        (dict(attn_mask=mask.expand(1, 1, 1, 5, 7)), "attn_mask: got shape"),
        (dict(attn_mask=mask.numpy()), "attn_mask: got ndarray"),
        (dict(query=q[0, 0, 0]), "query: got shape"),
        (dict(key=None), "key: got None"),
        (dict(key=k.float()), "k: got float32"),
        (dict(value=v[:, :2]), "leading axes"),
        (dict(dropout_p=1.0), "dropout_p: got 1"),
        (dict(dropout_p=-0.1), "dropout_p"),
    ]
    for change, words in refused:
        with pytest.raises(onchip.InvalidArgument, match=words):
            scaled_dot_product_attention(**(dict(query=q, key=k, value=v) | change))
    with pytest.raises(onchip.Unsupported, match=r"nested tensor.*cu_seqlens_q"):
        scaled_dot_product_attention(nested, nested, nested)


# ---- dropout


def test_dropout_draws_from_torchs_generator():
    """A38: the same seed gives the same mask, the next call another."""
    q, k = torch.zeros(1, 2, 64, 8), torch.zeros(1, 2, 64, 8)
    v = torch.eye(64).expand(1, 2, 64, 64)

    def weights():
        return scaled_dot_product_attention(q, k, v, dropout_p=0.25)

    torch.manual_seed(7)
    first, second = weights(), weights()
    torch.manual_seed(7)
    same(weights(), first)
    same(weights(), second)
    assert not torch.equal(first, second)
    kept = (first != 0).double().mean()
    sigma = (0.25 * 0.75 / first.numel()) ** 0.5
    assert abs(kept - 0.75) < 5 * sigma
    assert not torch.equal(first[0, 0], first[0, 1])
    torch.testing.assert_close(first[first != 0], torch.full_like(first[first != 0], 1 / 48))
    state = torch.get_rng_state()
    same(scaled_dot_product_attention(q, k, v), torch.full_like(first, 1 / 64))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_repeats_the_dropout(reentrant):
    tensors = inputs(*SHAPES["rank 4"])

    def function(*x):
        return scaled_dot_product_attention(*x, dropout_p=0.5)

    def run(call):
        torch.manual_seed(3)
        leaves = [x.clone().requires_grad_() for x in tensors]
        o = call(*leaves)
        o.backward(draw(o.shape, o.dtype, 4))
        return [o.detach(), *(x.grad for x in leaves)]

    for got, wanted in zip(
        run(lambda *x: checkpoint(function, *x, use_reentrant=reentrant)),
        run(function),
        strict=True,
    ):
        same(got, wanted)


# ---- torch.compile


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["rank 3", "rank 4", "rank 5", "keys of one head"])
def test_compiled(name, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(
        scaled_dot_product_attention, fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    tensors = inputs(*SHAPES[name])
    for options in (dict(is_causal=True), dict(attn_mask=draw((5, 7), torch.float64, 9))):
        got = gradients(compiled, tensors, **options)
        for one, other in zip(
            got, gradients(scaled_dot_product_attention, tensors, **options), strict=True
        ):
            torch.testing.assert_close(one, other)


def test_dropout_compiled():
    torch._dynamo.reset()
    compiled = torch.compile(
        scaled_dot_product_attention, fullgraph=True, backend="aot_eager", dynamic=True
    )
    tensors = inputs(*SHAPES["rank 4"])
    results = []
    for function in (compiled, scaled_dot_product_attention):
        torch.manual_seed(5)
        results.append(gradients(function, tensors, dropout_p=0.5))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)


# ---- what people have reported


def test_finite_minus_infinity_in_a_mask():
    """A04: finfo.min excludes as -inf does, and a row of nothing else is uniform."""
    q, k, v = inputs((1, 1, 441, 64), (1, 1, 441, 64), (1, 1, 441, 64), torch.float32)
    mask = torch.zeros(441, 441)
    mask[:, :128] = torch.finfo(torch.float32).min
    mask[5] = torch.finfo(torch.float32).min
    o, dq, dk, dv, dmask = gradients(scaled_dot_product_attention, (q, k, v), attn_mask=mask)
    assert all(x.isfinite().all() for x in (o, dq, dk, dv, dmask))
    left_out = F.scaled_dot_product_attention(
        q.double(), *(x[..., 128:, :].double() for x in (k, v))
    )
    rows = torch.arange(441) != 5
    torch.testing.assert_close(o[:, :, rows].double(), left_out[:, :, rows], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(o[0, 0, 5], v[0, 0].mean(0), rtol=1e-5, atol=1e-6)


def test_rows_without_keys_are_zero():
    tensors = inputs(*SHAPES["rank 4"])
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    o, *differentiated = gradients(scaled_dot_product_attention, tensors, attn_mask=mask)
    assert not o[:, :, 2].any() and not differentiated[0][:, :, 2].any()
    additive = torch.zeros(5, 7, dtype=torch.float64).masked_fill(~mask, -INF)
    with_additive = gradients(scaled_dot_product_attention, tensors, attn_mask=additive)
    for got, wanted in zip(with_additive, (o, *differentiated), strict=False):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)
    assert not with_additive[-1][2].any()


def test_hot_inputs():
    """A08: one token; queries and keys that make one weight 1; everything equal and huge."""
    q = 3 * draw((1, 1, 1, 16), torch.float16, 1)
    o, dq, dk, dv = gradients(scaled_dot_product_attention, (q, q, q))
    same(o, q)
    assert dq.abs().max() < 1e-3 and dk.abs().max() < 1e-3  # 0, but for sums in another order
    same(dv, draw(o.shape, o.dtype, 30))
    hot = inputs((1, 1, 100, 16), (1, 1, 100, 16), (1, 1, 100, 16))
    equal_torchs_own([30 * hot[0], 30 * hot[1], hot[2]], is_causal=True)
    thousand = torch.full((1, 1, 512, 32), 1000.0, dtype=torch.bfloat16)
    o, *differentiated = gradients(scaled_dot_product_attention, [thousand] * 3)
    same(o, thousand)
    assert all(x.isfinite().all() for x in differentiated)


def test_no_channels_in_queries_and_keys():
    """A22: the mean of v."""
    q = torch.empty(1, 16, 16, 0, dtype=torch.float64)
    v = draw((1, 16, 16, 1), torch.float64, 1)
    o = scaled_dot_product_attention(q, q, v)
    torch.testing.assert_close(o, v.mean(-2, keepdim=True).expand_as(v))


@pytest.mark.parametrize("dims", [(100, 100), (80, 64), (33, 1), (192, 128), (7, 256)])
def test_head_dims(dims):
    """A23"""
    equal_torchs_own(inputs((1, 2, 9, dims[0]), (1, 2, 11, dims[0]), (1, 2, 11, dims[1])))


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)])
def test_innermost_stride_other_than_1(which):
    """A26, A28"""
    tensors = inputs((2, 3, 17, 16), (2, 3, 17, 16), (2, 3, 17, 16), torch.float32)
    stored = [x.mT.contiguous().mT if n in which else x for n, x in enumerate(tensors)]
    assert any(x.stride(-1) != 1 for x in stored)
    same(scaled_dot_product_attention(*stored), scaled_dot_product_attention(*tensors))


@pytest.mark.parametrize("keys", [33, 65, 97])
def test_expanded_keys_with_a_mask(keys):
    """A27"""
    q, k, v = inputs((2, 4, 20, 32), (2, 1, keys, 32), (2, 1, keys, 32), torch.bfloat16)
    mask = draw((20, keys), seed=5) > 0

    def function(q, k, v, attn_mask, copied):
        k, v = (x.expand(-1, 4, -1, -1) for x in (k, v))
        if copied:
            k, v = k.contiguous(), v.contiguous()
        return scaled_dot_product_attention(q, k, v, attn_mask)

    results = [
        gradients(function, (q, k, v), attn_mask=mask, copied=copied) for copied in (False, True)
    ]
    for got, wanted in zip(*results, strict=True):
        same(got, wanted)


def test_many_batches_and_heads():
    """A31: no limit of a grid shows, with a bias that needs its gradient."""
    for shape in ((65537, 1, 2, 8), (1, 65537, 2, 8)):
        tensors = inputs(shape, shape, shape, torch.float32)
        bias = draw((1, 1, 2, 2), torch.float32, 6)
        *got, dbias = gradients(scaled_dot_product_attention, tensors, attn_mask=bias)
        *wanted, theirs = gradients(
            F.scaled_dot_product_attention,
            [x.double() for x in tensors],
            attn_mask=bias.double(),
        )
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(dbias.double(), theirs, rtol=1e-4, atol=1e-3)


def test_nan_is_neither_spread_nor_lost():
    """A39: masked keys have no influence; a NaN query is a NaN row and nothing else."""
    q, k, v = inputs((1, 2, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8), torch.float32)
    clean = scaled_dot_product_attention(q, k[:, :, :4], v[:, :, :4])
    k[:, :, 4:] = v[:, :, 4:] = float("nan")
    mask = torch.arange(6) < 4
    got = gradients(scaled_dot_product_attention, (q, k, v), attn_mask=mask)
    torch.testing.assert_close(got[0], clean, rtol=1e-6, atol=1e-6)
    assert got[1].isfinite().all() and not got[2][:, :, 4:].any() and not got[3][:, :, 4:].any()
    q, k, v = inputs((1, 2, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8), torch.float32)
    wanted = scaled_dot_product_attention(q, k, v)
    q[:, :, 0] = float("nan")
    o = scaled_dot_product_attention(q, k, v)
    assert o[:, :, 0].isnan().all()
    same(o[:, :, 1:], wanted[:, :, 1:])


def test_a_ramp_with_a_length_off_the_tile():
    """A43: finite gradients in bfloat16."""
    length = 1025
    tensors = inputs(*[(1, 1, length, 64)] * 3, torch.bfloat16)
    position = torch.arange(length)
    ramp = (position[:, None] - position[None, :]).to(torch.bfloat16)
    ramp = ramp.masked_fill(position[None, :] > position[:, None], -INF)[None, None]
    got = gradients(scaled_dot_product_attention, tensors, attn_mask=ramp)
    wanted = gradients(
        F.scaled_dot_product_attention, [x.double() for x in tensors], attn_mask=ramp.double()
    )
    for one, other in zip(got[:4], wanted, strict=False):
        assert one.isfinite().all()
        error = (one.double() - other).abs().max()
        assert error <= 4 * torch.finfo(torch.bfloat16).eps * other.abs().max()


@pytest.mark.parametrize("keys", [8, 16, 32, 64, 128, 192])
@pytest.mark.parametrize("more", [0, 1])
def test_ones_off_the_tile(keys, more):
    """A44"""
    queries = keys + more
    q, k = torch.ones(1, 1, queries, 16), torch.ones(1, 1, keys, 16)
    leaves = [q.requires_grad_(), k.clone().requires_grad_(), k.clone().requires_grad_()]
    first = None
    for _ in range(10):
        o = scaled_dot_product_attention(*leaves)
        results = [o.detach(), *torch.autograd.grad(o.sum(), leaves)]
        first = first or results
        for got, wanted in zip(results, first, strict=True):
            same(got, wanted)
    o, dq, dk, dv = first
    torch.testing.assert_close(o, torch.ones_like(o))
    assert dq.abs().max() < 1e-4 and dk.abs().max() < 1e-4
    torch.testing.assert_close(dv, torch.full_like(dv, queries / keys), rtol=1e-5, atol=1e-5)


def test_equals_the_attention_it_is_made_of():
    """Top-left here; onchip.torch.attention is bottom-right unless told."""
    q, k, v = inputs(*SHAPES["rank 4"])
    got = scaled_dot_product_attention(q, k, v, is_causal=True)
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    same(got, attention(*rows, causal=True, alignment="top_left").transpose(1, 2))
    assert not torch.equal(got, attention(*rows, causal=True).transpose(1, 2))
