"""Gradients of onchip.torch.attention on CPU tensors, by every way that PyTorch has to them beside
plain autograd: torch.func, checkpoints, autocast, the registered operators, compilers, threads."""

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
    DTYPES,
    PACKED,
    all_same,
    as_operator_arguments,
    cotangents,
    dense,
    draw,
    every_case,
    leaves,
    poisoned_memory,  # noqa: F401  a fixture of every test here
    run,
    same,
)

import onchip.torch  # noqa: E402
from onchip.torch import attention  # noqa: E402

FORWARD = torch.ops.onchip.attention_forward
BACKWARD = torch.ops.onchip.attention_backward
JIT_DEPRECATED = "ignore:`torch.jit.script` is deprecated"  # PyTorch's own use of it


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


@every_case
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(case, reentrant):
    """The same bits, with packed tensors and dropout too."""
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


@every_case
def test_opcheck_with_gradients(case):
    make, options = case
    tensors, options = leaves(make(), options)
    torch.library.opcheck(FORWARD, as_operator_arguments(tensors, options))


@every_case
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


@every_case
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
