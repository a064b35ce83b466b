"""Gradients of onchip.torch.attention on CPU tensors, by every way that PyTorch has to them."""

import functools
import threading

import numpy as np
import pytest

import onchip

torch = pytest.importorskip("torch")
import torch.autograd.forward_ad as forward_ad  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch_cases import (  # noqa: E402
    CASES,
    DTYPES,
    PACKED,
    as_operator_arguments,
    dense,
    draw,
    leaves,
    packed,
    same,
    wanted_gradients,
)

import onchip.torch  # noqa: E402
from onchip.torch import attention  # noqa: E402

FORWARD = torch.ops.onchip.attention_forward
BACKWARD = torch.ops.onchip.attention_backward
JIT_DEPRECATED = "ignore:`torch.jit.script` is deprecated"  # PyTorch's own use of it
by_name = functools.partial(pytest.mark.parametrize, "name")


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Results and workspace start as NaN: what a kernel fails to write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=CASES)
def case(request):
    make, options = CASES[request.param]
    return make, options


def cotangents(o, lse, seed=20):
    return draw(o.shape, o.dtype, seed), draw(lse.shape, lse.dtype, seed + 1)


def run(tensors, options, function=attention):
    """o, lse and the gradients under fixed cotangents of both."""
    tensors, options = leaves(tensors, options)
    o, lse = function(*tensors, **options, return_lse=True)
    torch.autograd.backward((o, lse), cotangents(o, lse))
    gradients = [x.grad for x in wanted_gradients(tensors, options)]
    return o.detach(), lse.detach(), *gradients


def all_same(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        same(one, other)


# ---- the gradients


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


# ---- forward mode, torch.func


@pytest.mark.filterwarnings(JIT_DEPRECATED)
def test_forward_mode_is_refused():
    q, k, v = dense(torch.float64)
    for grad in (False, True):
        for way in (attention, lambda *x: FORWARD(*as_operator_arguments(x, {}))):
            with forward_ad.dual_level(), torch.set_grad_enabled(grad):
                dual = forward_ad.make_dual(k, torch.ones_like(k))
                with pytest.raises(onchip.Unsupported, match="no forward-mode derivative"):
                    way(q, dual, v)
                way(q, k, v)
    for transform in (
        lambda f: torch.func.jvp(f, (q,), (q,)),
        lambda f: torch.func.jacfwd(f)(q),
        lambda f: torch.func.jvp(torch.func.grad(lambda x: f(x).sum()), (q,), (q,)),
    ):
        with pytest.raises(onchip.Unsupported, match="no forward-mode derivative"):
            transform(lambda x: attention(x, k, v))


def test_transforms_of_first_order():
    q, k, v = dense(torch.float64, rows=(3, 5))
    options = dict(causal=True, bias=draw((2, 4, 3, 5), torch.float64, 4))

    def loss(q, k, v, function=attention):
        o, lse = function(q, k, v, **options, return_lse=True)
        return o.sin().sum() + lse.cos().sum()

    leaf = [x.clone().requires_grad_() for x in (q, k, v)]
    all_same(torch.func.grad(loss, (0, 1, 2))(q, k, v), torch.autograd.grad(loss(*leaf), leaf))
    value, pullback = torch.func.vjp(loss, q, k, v)
    assert value == loss(q, k, v)
    all_same(pullback(torch.ones_like(value)), torch.autograd.grad(loss(*leaf), leaf))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_over_samples():
    """One sample at a time: vmap is correct, not fast."""
    samples = [torch.stack([x, 2 * x, -x]) for x in dense(torch.float64, rows=(3, 5))]

    def loss(q, k, v):
        return attention(q, k, v, causal=True).sin().sum()

    wanted = [attention(*x) for x in zip(*samples, strict=True)]
    same(torch.vmap(attention)(*samples), torch.stack(wanted))
    per_sample = torch.vmap(torch.func.grad(loss))(*samples)
    wanted = [torch.func.grad(loss)(*x) for x in zip(*samples, strict=True)]
    same(per_sample, torch.stack(wanted))
    q, k, v = (x[0] for x in samples)
    jacobian = torch.func.jacrev(lambda x: attention(x, k, v))(q)
    wanted = torch.autograd.functional.jacobian(lambda x: attention(x, k, v), q)
    torch.testing.assert_close(jacobian, wanted)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_batches_of_cotangents():
    """What PyTorch vectorises by a vmap of its own, which torch.func does not know of."""
    tensors, _ = leaves(dense(torch.float64, rows=(3, 5)), {})
    o, lse = attention(*tensors, return_lse=True)
    batches = [draw((4, *x.shape), torch.float64, seed) for seed, x in enumerate((o, lse))]
    got = torch.autograd.grad((o, lse), tensors, batches, is_grads_batched=True, retain_graph=True)
    each = [
        torch.autograd.grad((o, lse), tensors, pair, retain_graph=True)
        for pair in zip(*batches, strict=True)
    ]
    all_same(got, [torch.stack(x) for x in zip(*each, strict=True)])


@pytest.mark.filterwarnings("ignore:There is a performance drop", JIT_DEPRECATED)
def test_transforms_of_second_order_are_refused():
    q, k, v = dense(torch.float64, rows=(2, 2))

    def gradient(x):
        return torch.func.grad(lambda y: attention(y, k, v).sum())(x)

    for second in (
        lambda: torch.func.grad(lambda x: gradient(x).sum())(q),
        lambda: torch.func.hessian(lambda x: attention(x, k, v).sum())(q),
        lambda: torch.func.jacrev(gradient)(q),
    ):
        with pytest.raises(onchip.Unsupported, match=r"second derivative|forward-mode"):
            second()


# ---- checkpointing


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(case, reentrant):
    """A48: the same bits, with packed tensors and dropout too."""
    make, options = case

    def function(*tensors, return_lse, **options):
        def body(q, k, v, bias, sink):
            more = dict(bias=bias, sink=sink, return_lse=return_lse)
            return attention(q, k, v, **(options | more))

        more = options.get("bias"), options.get("sink")
        return checkpoint(body, *tensors, *more, use_reentrant=reentrant)

    fixed = {name: x for name, x in options.items() if not (reentrant and name in ("bias", "sink"))}
    all_same(run(make(), fixed, function), run(make(), fixed))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_views_of_packed_qkv(reentrant):
    qkv = draw((61, 3, 2, 16), seed=1)
    cu_seqlens = PACKED["cu_seqlens_kv"]

    def body(x):
        return attention(*(2 * x).unbind(1), cu_seqlens_q=cu_seqlens, causal=True)

    plain, kept = qkv.clone().requires_grad_(), qkv.clone().requires_grad_()
    body(plain).square().sum().backward()
    checkpoint(body, kept, use_reentrant=reentrant).square().sum().backward()
    same(kept.grad, plain.grad)


def test_saved_tensors_may_travel():
    tensors, _ = leaves(dense(), {})
    with torch.autograd.graph.save_on_cpu():
        o = attention(*tensors, causal=True)
    wanted = attention(*tensors, causal=True)
    all_same(torch.autograd.grad(o.sum(), tensors), torch.autograd.grad(wanted.sum(), tensors))


def test_selective_checkpointing_keeps_its_results(monkeypatch):
    x = [y.requires_grad_() for y in dense()]
    calls = []

    def policy(context, operator, *_, **__):
        if operator is FORWARD.default:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def forward(*arguments):
        calls.append("forward")
        return run_forward(*arguments)

    run_forward = onchip.torch._run.forward
    monkeypatch.setattr(onchip.torch._run, "forward", forward)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    o = checkpoint(
        lambda *y: attention(*(2 * z for z in y)), *x, use_reentrant=False, context_fn=contexts
    )
    got = torch.autograd.grad(o.sum(), x)
    assert calls == ["forward"]
    all_same(got, torch.autograd.grad(attention(*(2 * y for y in x)).sum(), x))


# ---- autocast


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_torchs_own(target):
    tensors, _ = leaves(dense(torch.float32), {})
    options = dict(bias=draw((1, 4, 33, 45), seed=4), sink=draw((4,), seed=5))
    with torch.autocast("cpu", target):
        o, lse = attention(*tensors, **options, return_lse=True)
        theirs = torch.nn.functional.scaled_dot_product_attention(*(x.mT for x in tensors[:1] * 3))
        assert o.dtype == theirs.dtype == target and lse.dtype == torch.float32
        double = attention(*dense(torch.float64))
        assert double.dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert attention(*dense(torch.float32)).dtype == torch.float32
    gradients = torch.autograd.grad((o, lse), tensors, cotangents(o, lse))
    cast = [x.detach().to(target).requires_grad_() for x in tensors]
    by_hand = attention(*cast, **options, return_lse=True)
    all_same((o, lse), by_hand)
    wanted = torch.autograd.grad(by_hand, cast, cotangents(o, lse))
    assert {x.dtype for x in gradients} == {torch.float32}
    all_same(gradients, [x.float() for x in wanted])


def test_autocast_reconciles_dtypes():
    """A projection in bfloat16 beside one that something kept in float32."""
    q, k, v = dense(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        same(attention(q.bfloat16(), k, v), attention(q, k, v))


# ---- the registered operators


def test_opcheck_with_gradients(case):
    make, options = case
    tensors, options = leaves(make(), options)
    torch.library.opcheck(FORWARD, as_operator_arguments(tensors, options))


def test_opcheck_of_the_backward(case):
    make, options = case
    tensors = make()
    o, lse = attention(*tensors, **options, return_lse=True)
    d_o, d_lse = cotangents(o, lse)
    arguments = as_operator_arguments(tensors, options)
    wanted = [True, False, True, "bias" in options, "sink" in options]
    for given in (d_lse, None):
        torch.library.opcheck(BACKWARD, (d_o, o, lse, given, *arguments, wanted))


# ---- torch.compile


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **options)


def block(*tensors, return_lse=True, **options):
    o, lse = attention(*(2 * x for x in tensors), **options, return_lse=True)
    return o * 3, lse.exp()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_with_its_backward(case, dynamic):
    make, options = case
    function = compiled(block, backend="aot_eager", dynamic=dynamic)
    for got, wanted in zip(
        run(make(), options, function), run(make(), options, block), strict=True
    ):
        torch.testing.assert_close(got, wanted)


def test_one_graph_serves_every_length_with_gradients():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = torch.compile(lambda *x: attention(*x, causal=True), backend=counter)
    for length in (5, 9, 33, 120):
        tensors = [draw((1, length, 2, 8), seed=seed).requires_grad_() for seed in range(3)]
        for x in tensors:
            torch._dynamo.mark_dynamic(x, 1)
        got = torch.autograd.grad(function(*tensors).sum(), tensors)
        all_same(got, torch.autograd.grad(attention(*tensors, causal=True).sum(), tensors))
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("default")  # of PyTorch's own
def test_compiled_by_inductor_with_its_backward():
    function = compiled(block)
    tensors, options = dense(torch.float64), dict(causal=True, window=(9, 0))
    for got, wanted in zip(
        run(tensors, options, function), run(tensors, options, block), strict=True
    ):
        torch.testing.assert_close(got, wanted)


def test_compiled_with_a_checkpoint_inside():
    def function(*tensors):
        def body(q, k, v):
            return onchip.torch.scaled_dot_product_attention(2 * q, k, v, dropout_p=0.5).sin()

        return checkpoint(body, *tensors, use_reentrant=False).sum()

    tensors, _ = leaves(dense(torch.float64, heads=(4, 4), rows=(9, 9)), {})
    results = []
    for call in (compiled(function, backend="aot_eager"), function):
        torch.manual_seed(3)
        results.append(torch.autograd.grad(call(*tensors), tensors))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)


def test_compiled_under_autocast():
    function = compiled(block, backend="aot_eager")
    tensors = dense()

    def under(function):
        def call(*x, **options):
            with torch.autocast("cpu", torch.bfloat16):
                return function(*x, **options)

        return call

    got, wanted = run(tensors, {}, under(function)), run(tensors, {}, under(block))
    assert got[0].dtype == torch.bfloat16
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


# ---- threads


def test_many_threads():
    inputs = [dense(dtype) for dtype in DTYPES] * 2
    wanted = [run(x, dict(causal=True)) for x in inputs]
    failures = []

    def work(index):
        try:
            for _ in range(5):
                all_same(run(inputs[index], dict(causal=True)), wanted[index])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_in_a_training_step():
    """Gradients reach parameters through views, and an optimizer makes the loss smaller."""
    torch.manual_seed(0)
    project = torch.nn.Linear(16, 48)
    x = draw((2, 20, 16), seed=1)
    target = draw((2, 20, 16), seed=2)
    optimizer = torch.optim.Adam(project.parameters(), 0.05)
    losses = []
    for _ in range(20):
        q, k, v = project(x).unflatten(-1, (3, 4, 4)).unbind(2)
        loss = (attention(q, k, v, causal=True).flatten(2) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.isfinite(losses).all() and losses[-1] < 0.9 * losses[0]
