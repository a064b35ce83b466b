"""Gradients of onchip.torch.attention on CPU tensors, by plain autograd: their values, what is
kept, what is refused."""

import functools

import pytest

import onchip

torch = pytest.importorskip("torch")
from torch_cases import (  # noqa: E402
    DTYPES,
    PACKED,
    all_same,
    as_operator_arguments,
    cotangents,
    dense,
    draw,
    every_case,
    leaves,
    packed,
    poisoned_memory,  # noqa: F401  a fixture of every test here
    run,
    same,
    wanted_gradients,
)

import onchip.torch  # noqa: E402
from onchip.torch import attention  # noqa: E402

FORWARD = torch.ops.onchip.attention_forward
BACKWARD = torch.ops.onchip.attention_backward
by_name = functools.partial(pytest.mark.parametrize, "name")


# ---- the gradients


@every_case
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_the_operators_on_arrays(case, dtype):
    """Their accuracy is judged there, on every backend."""
    make, options = case
    tensors = make(dtype)
    o, lse = onchip.ops.attention_forward(*tensors, **options)
    d_o, d_lse = cotangents(o, lse)
    wanted = onchip.ops.attention_backward(d_o, *tensors, o, lse, d_lse=d_lse, **options)
    all_same(run(tensors, options), [o, lse, *(x for x in wanted if x is not None)])


SMALL = {
    "plain": {},
    "causal": dict(causal=True, alignment="top_left", scale=-0.4),
    "window, softcap": dict(window=(3, 1), softcap=1.5),
    "bias over the batch": dict(bias=draw((1, 2, 4, 6), torch.float64, 4)),
    "bias over heads and queries": dict(bias=draw((2, 1, 1, 6), torch.float64, 4)),
    "bias in float32": dict(bias=draw((2, 2, 4, 6), torch.float32, 4)),
    "sink, empty rows": dict(sink=draw((2,), torch.float64, 5), causal=True, window=(2, -1)),
    "mask, segments, alibi": dict(
        mask=draw((2, 1, 4, 6), seed=6) > -0.5,
        q_segment_ids=torch.tensor([[0, 0, 1, 1]] * 2, dtype=torch.int32),
        kv_segment_ids=torch.tensor([[0, 0, 0, 1, 1, 2]] * 2, dtype=torch.int32),
        alibi_slopes=draw((2,), seed=7).abs(),
    ),
    "dropout": dict(dropout_p=0.4, dropout_rng=(11, 3)),
    "lengths": dict(seqlens_q=[4, 2], seqlens_kv=torch.tensor([6, 0], dtype=torch.int32)),
    "more queries than keys": dict(causal=True),
    "sink far above": dict(sink=torch.full((2,), 100.0, dtype=torch.float64)),
    "sink far below": dict(sink=torch.full((2,), -5.0, dtype=torch.float64), causal=True),
}


def gradcheck(tensors, options):
    tensors, options = leaves(tensors, options)
    inputs = wanted_gradients(tensors, options)
    names = ["q", "k", "v", *(name for name in ("bias", "sink") if name in options)]
    # Differences of float32 inputs would say nothing: such a bias is constant here.
    checked = [x for x in inputs if x.dtype == torch.float64]
    fixed = {
        name: x.detach() if isinstance(x, torch.Tensor) and x.dtype != torch.float64 else x
        for name, x in options.items()
    }
    names = [name for name, x in zip(names, inputs, strict=True) if x.dtype == torch.float64]

    def function(*arguments):
        o, lse = attention(**(fixed | dict(zip(names, arguments, strict=True))), return_lse=True)
        return o, torch.where(lse.isfinite(), lse, 0)

    assert torch.autograd.gradcheck(function, checked)


@by_name(SMALL)
def test_gradcheck(name):
    rows = (6, 4) if name == "more queries than keys" else (4, 6)
    gradcheck(dense(torch.float64, heads=(2, 1), dims=(3, 2), rows=rows), SMALL[name])


@pytest.mark.parametrize("more", [{}, dict(causal=True), dict(dropout_p=0.3, dropout_rng=(1, 2))])
def test_gradcheck_packed(more):
    tensors = [draw((7, h, d), torch.float64, d) for h, d in ((2, 3), (1, 3), (1, 2))]
    gradcheck(tensors, dict(cu_seqlens_q=[0, 3, 3, 6], cu_seqlens_kv=[0, 2, 4, 7]) | more)


def plain_formula(q, k, v, bias=None, sink=None, causal=False):
    """By autograd of torch's own arithmetic, scores in memory. [batch, seq, heads, dim]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool)
        visible = visible.tril(scores.shape[-1] - scores.shape[-2])
        scores = scores.masked_fill(~visible, float("-inf"))
    logits = scores
    if sink is not None:
        column = sink[:, None, None].expand(*scores.shape[:-1], 1)
        logits = torch.cat([scores, column], -1)
    lse = logits.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v).transpose(1, 2), lse


def test_equal_autograd_of_the_plain_formula():
    tensors = dense(torch.float64)
    options = dict(
        bias=draw((1, 4, 33, 45), torch.float64, 4), sink=draw((4,), torch.float64, 5), causal=True
    )
    wanted = run(
        tensors, options, lambda *args, return_lse, **kwargs: plain_formula(*args, **kwargs)
    )
    for got, want in zip(run(tensors, options), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_broadcast_bias_gets_the_sum(dtype):
    """A41: a float32 bias beside narrower q, broadcast over a batch of more than one."""
    q, k, v = (draw((8, 40, 4, 32), dtype, seed) for seed in range(3))
    bias = draw((1, 4, 40, 40), torch.float32, 4)
    *_, summed = run((q, k, v), dict(bias=bias))
    *_, each = run((q, k, v), dict(bias=bias.expand(8, -1, -1, -1)))
    assert summed.dtype == torch.float32 and summed.isfinite().all()
    torch.testing.assert_close(summed, each.sum(0, keepdim=True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [3, 200])
def test_gradient_of_lse_alone_and_of_both(length):
    """A15: d_lse is a gradient like d_o; an output that no loss uses adds nothing."""
    tensors = [draw((1, length, 2, 8), torch.float64, seed).requires_grad_() for seed in range(3)]
    d_o, d_lse = draw((1, length, 2, 8), torch.float64, 5), draw((1, 2, length), torch.float64, 6)

    def gradients(function, loss):
        return torch.autograd.grad(loss(*function(*tensors)), tensors, allow_unused=True)

    for loss in (
        lambda o, lse: (lse * d_lse).sum(),
        lambda o, lse: (o * d_o).sum(),
        lambda o, lse: (o * d_o).sum() + (lse * d_lse).sum(),
    ):
        got = gradients(lambda *x: attention(*x, return_lse=True), loss)
        for one, other in zip(got, gradients(plain_formula, loss), strict=True):
            other = torch.zeros_like(one) if other is None else other
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("value", [-5.0, 0.5, 100.0])
def test_sinks(value):
    """A16: an empty row has o = 0 and the sink as lse; a sink far above all scores is finite."""
    tensors = dense(torch.float64, rows=(9, 6))
    sink = torch.full((4,), value, dtype=torch.float64)
    options = dict(sink=sink, causal=True, window=(4, -1))
    o, lse, *gradients = run(tensors, options)
    assert not o[:, :3].any() and (lse[..., :3] == value).all()
    assert all(x.isfinite().all() for x in (o, lse, *gradients))
    # Rows without keys have lse = sink: their cotangents reach it whole.
    d_lse = cotangents(o, lse)[1]
    only_empty = run(tensors, dict(sink=sink, window=(0, 0), seqlens_kv=[0, 0]))[-1]
    torch.testing.assert_close(only_empty, d_lse.sum((0, 2)), rtol=1e-12, atol=1e-12)


def test_any_layout_of_the_cotangent():
    """A25: as o.sum(), a concatenation and a transposition make them."""
    tensors = dense(torch.float32, dims=(16, 16))
    leaf, _ = leaves(tensors, {})

    def gradients(loss):
        return torch.autograd.grad(loss(attention(*leaf)), leaf)

    weights = draw((2, 33, 4, 16), seed=9)
    ones = torch.ones_like(weights)
    all_same(gradients(lambda o: o.sum()), gradients(lambda o: (o * ones).sum()))
    wanted = gradients(lambda o: (o * weights).sum())
    wide = torch.cat([weights, weights], -1)
    all_same(gradients(lambda o: (torch.cat([o, o.detach()], -1) * wide).sum()), wanted)
    turned = weights.transpose(1, 3).contiguous()
    all_same(gradients(lambda o: (o.transpose(1, 3) * turned).sum()), wanted)


@pytest.mark.parametrize("which", range(3))
def test_any_layout_of_the_inputs(which):
    tensors = list(dense(torch.float32))
    wanted = run(tensors, {})
    x = tensors[which]
    for variant in (
        x.transpose(1, 3).contiguous().transpose(1, 3),
        torch.cat([x, x.new_full(x.shape, float("nan"))], -1)[..., : x.shape[-1]],
        torch.complex(torch.zeros_like(x), -x).conj().imag,
    ):
        given = [variant if index == which else y for index, y in enumerate(tensors)]
        given = [y.detach().requires_grad_() for y in given]
        o, lse = attention(*given, return_lse=True)
        gradients = torch.autograd.grad((o, lse), given, cotangents(o, lse))
        all_same([o.detach(), lse.detach(), *gradients], wanted)


def test_plain_memory_is_used_where_it_lies(monkeypatch):
    """By the shortest way, which takes a fraction of the time on the host: `_calls.run` is not
    gone to. Where it has to be, the results are the same."""

    def refuse(op, *_):
        raise AssertionError(f"{op.name} went the long way")

    tensors = [x.requires_grad_() for x in dense()]
    o, lse = attention(*tensors, causal=True, return_lse=True)
    wanted = torch.autograd.grad((o, lse), tensors, cotangents(o, lse))
    with monkeypatch.context() as patch:
        patch.setattr(onchip._calls, "run", refuse)
        direct = attention(*tensors, causal=True, return_lse=True)
        all_same(torch.autograd.grad(direct, tensors, cotangents(*direct)), wanted)
        with torch.no_grad():
            same(attention(*tensors, causal=True), o)
            with pytest.raises(AssertionError, match="the long way"):
                attention(tensors[0].mT.contiguous().mT, *tensors[1:], causal=True)


def test_what_a_transform_left_behind():
    """A tensor of torch.func whose transform has ended is the tensor inside."""
    q, k, v = dense()
    left = []
    torch.func.grad(lambda x: (left.append(x), x.sum())[1])(q)
    k.requires_grad_()
    o = attention(left[0], k, v)
    same(o, attention(q, k, v))
    same(torch.autograd.grad(o.sum(), k)[0], torch.autograd.grad(attention(q, k, v).sum(), k)[0])


@by_name(["q", "k", "v", "bias", "sink"])
def test_only_the_wanted_gradient_is_computed(name, monkeypatch):
    arguments = dict(zip("qkv", dense(), strict=True))
    arguments |= dict(bias=draw((2, 4, 33, 45)), sink=draw((4,)))
    everything = dict(
        zip(
            ("q", "k", "v", "bias", "sink"),
            run(tuple(arguments[x] for x in "qkv"), {x: arguments[x] for x in ("bias", "sink")})[
                2:
            ],
            strict=True,
        )
    )
    arguments[name] = torch.nn.Parameter(arguments[name])
    planned = []

    class Recorded:
        def run(self, given, gradients, *rest):
            names = onchip.torch._arguments.GRADIENTS
            planned.append([x for x, y in zip(names, gradients, strict=True) if y is not None])
            return backward.run(given, gradients, *rest)

    backward = onchip.torch._run._BACKWARD
    o, lse = attention(**arguments, return_lse=True)
    assert o.requires_grad and lse.requires_grad
    monkeypatch.setattr(onchip.torch._run, "_BACKWARD", Recorded())
    (gradient,) = torch.autograd.grad((o, lse), [arguments[name]], cotangents(o, lse))
    assert planned == [["d" + name]]
    same(gradient, everything[name])


@by_name(["q", "k", "v", "bias", "sink"])
def test_without_grad_nothing_is_recorded(name):
    arguments = dict(zip("qkv", dense(), strict=True))
    arguments |= dict(bias=draw((2, 4, 33, 45)), sink=draw((4,)))
    wanted = attention(**arguments)
    assert not wanted.requires_grad
    arguments[name] = torch.nn.Parameter(arguments[name])
    for without_gradients in (torch.no_grad(), torch.inference_mode()):
        with without_gradients:
            o = attention(**arguments)
        assert not o.requires_grad
        same(o, wanted)
    same(attention(**arguments).detach(), wanted)


def test_nothing_as_large_as_the_scores_is_kept():
    tensors, _ = leaves(dense(rows=(70, 90)), {})
    kept = []

    def pack(x):
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o = attention(*tensors, causal=True)
    assert sorted(kept) == sorted([*(x.numel() for x in tensors), o.numel(), 2 * 4 * 70])


def test_no_elements():
    q, k, v = dense()
    for tensors in ((q, k[:, :0], v[:, :0]), (q[:, :0], k, v)):
        _, _, *gradients = run(tensors, dict(sink=draw((4,))))
        dq, dk, dv, dsink = gradients
        assert [x.shape for x in (dq, dk, dv)] == [x.shape for x in tensors]
        assert not dq.any() and not dk.any() and not dv.any() and dsink.isfinite().all()


# ---- refusals


def test_slopes_have_no_gradient():
    tensors = dense()
    slopes = draw((4,), seed=3).requires_grad_()
    ways = [
        attention,
        lambda *x, alibi_slopes: FORWARD(
            *as_operator_arguments(x, dict(alibi_slopes=alibi_slopes))
        ),
        lambda *x, alibi_slopes: torch.func.grad(lambda y: attention(*x, alibi_slopes=y).sum())(
            alibi_slopes
        ),
    ]
    for way in ways:
        with pytest.raises(onchip.InvalidArgument, match=r"alibi_slopes: .*no gradient"):
            way(*tensors, alibi_slopes=slopes)
    with torch.no_grad():
        attention(*tensors, alibi_slopes=slopes)


def test_second_derivatives_are_refused():
    """A46: at the first call that would need them, by either way in."""
    q, k, v = (draw((1, 64, 1, 8), torch.float64, seed).requires_grad_() for seed in range(3))
    ways = [
        attention,
        lambda *tensors: FORWARD(*as_operator_arguments(tensors, {}))[0],
    ]
    for way in ways:
        with pytest.raises(onchip.Unsupported, match="attention has no second derivative"):
            torch.autograd.grad(way(q, k, v).sum(), q, create_graph=True)
        with pytest.raises(onchip.Unsupported, match="attention has no second derivative"):
            way(q, k, v).sum().backward(create_graph=True)
        assert q.grad is None
    o, lse = attention(q, k, v, return_lse=True)
    saved = (torch.ones_like(o), o.detach(), lse.detach(), None)
    arguments = as_operator_arguments((q, k, v), {})
    dq, *_ = BACKWARD(*saved, *arguments, [True] * 3 + [False] * 2)
    with pytest.raises(onchip.Unsupported, match="attention has no second derivative"):
        dq.sum().backward()


def test_the_forced_backend_is_the_backwards_too():
    tensors, _ = leaves(dense(), {})
    o = attention(*tensors, backend="reference")
    all_same(torch.autograd.grad(o.sum(), tensors), run_sum(dense(), "reference"))


def run_sum(tensors, backend):
    o, lse = onchip.ops.attention_forward(*tensors, backend=backend)
    d_o = torch.ones_like(o)
    return onchip.ops.attention_backward(d_o, *tensors, o, lse, backend=backend)[:3]


def test_what_changed_in_between_is_noticed():
    tensors, _ = leaves(packed(), {})
    cu_seqlens = PACKED["cu_seqlens_q"].clone()
    o = attention(*tensors, cu_seqlens_q=cu_seqlens)
    cu_seqlens[1] = 5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()
