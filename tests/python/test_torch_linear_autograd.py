"""Gradients of onchip.torch's linear operators on CPU tensors, by every way that PyTorch has."""

import functools

import pytest

import onchip

torch = pytest.importorskip("torch")
import torch.autograd.forward_ad as forward_ad  # noqa: E402
from linear_cases import VARIANTS, Sizes, variant_id, with_tokens  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch_cases import draw as draw_tensor  # noqa: E402
from torch_cases import same  # noqa: E402
from torch_linear_cases import (  # noqa: E402
    call,
    draw,
    draw_state,
    leaf_state,
    leaves,
    parts_of,
    plain,
)

import onchip.torch  # noqa: E402
from onchip.torch._linear import OPERATORS  # noqa: E402

JIT_DEPRECATED = "ignore:`torch.jit.script` is deprecated"  # PyTorch's own use of it
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
FIRST = {variant.op: variant for variant in reversed(VARIANTS)}
every_operator = pytest.mark.parametrize("variant", FIRST.values(), ids=variant_id)
SMALL = Sizes(batch=1, length=3, heads_k=1, heads_v=2, dk=2, dv=2)


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Results and workspace start as NaN: what a kernel fails to write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def all_same(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        same(one, other)


def close(got, wanted, tolerance=1e-9):
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def differentiable_results(variant, o, state):
    """o and the parts of the state that have gradients."""
    return o, *parts_of(state)[: min(variant.parts, 2)]


def cotangents(results, seed=20):
    return [draw_tensor(x.shape, x.dtype, seed + index) for index, x in enumerate(results)]


def gradients(variant, tensors, state=None, function=call, **options):
    """Of every tensor and part of the initial state, under fixed cotangents of every result."""
    tensors, state = leaves(tensors), leaf_state(state)
    o, final = function(variant, tensors, initial_state=state, output_final_state=True, **options)
    results = differentiable_results(variant, o, final)
    torch.autograd.backward(results, cotangents(results))
    return [x.grad for x in (*tensors.values(), *parts_of(state))]


def plain_call(variant, tensors, *, initial_state, output_final_state, state_layout=None):
    o, parts = plain(variant, tensors, initial_state, layout=state_layout)
    return o, parts if len(parts) > 1 else parts[0]


# ---- the gradients


@every_variant
@pytest.mark.parametrize("layout", ["kv", "vk"])
def test_equal_autograd_of_a_plain_loop(variant, layout):
    given = variant, draw(variant), draw_state(variant, layout=layout)
    options = variant.with_layout(layout)
    got = gradients(*given, **options)
    close(got, gradients(*given, plain_call, **options))


@every_operator
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_have_the_dtype_of_their_tensor(variant, dtype):
    tensors = draw(variant, dtype)
    state = draw_state(variant, dtype=torch.float32)
    got = gradients(variant, tensors, state, chunk_len=16)
    given = [*tensors.values(), *parts_of(state)]
    assert [x.dtype for x in got] == [x.dtype for x in given]
    exact = {name: x.double() for name, x in tensors.items()}
    wide = tuple(part.double() for part in parts_of(state))
    want = gradients(variant, exact, wide if len(wide) > 1 else wide[0])
    for one, other in zip(got, want, strict=True):
        assert torch.norm(one.double() - other) <= (0.02 if dtype != torch.float32 else 1e-4) * (
            torch.norm(other) + 0.1
        )


@every_operator
def test_gradcheck(variant):
    """Packed, an empty sequence included."""
    tensors = leaves(draw(variant, sizes=SMALL, lead=(3,)))
    state = leaf_state(draw_state(variant, 3, sizes=SMALL))
    # m_T counts as a constant: its own derivative is not C's. That of m_0 is exact.

    def function(*arguments):
        given = dict(zip(tensors, arguments, strict=False))
        parts = arguments[len(tensors) :]
        o, final = call(
            variant,
            given,
            initial_state=parts if len(parts) > 1 else parts[0],
            output_final_state=True,
            cu_seqlens=[0, 2, 2, 3],
        )
        if variant.parts != 3:
            return differentiable_results(variant, o, final)
        c, n, m = final
        weight = m.exp()
        spread = [weight.reshape(*weight.shape, *[1] * (x.dim() - weight.dim())) for x in (c, n)]
        return o, c * spread[0], n * spread[1]

    assert torch.autograd.gradcheck(function, (*tensors.values(), *parts_of(state)))


@every_operator
def test_losses_of_some_results(variant):
    """L18: on o, on the final state, on both; without an initial state, with zeros, with any."""
    tensors = draw(variant)
    zeros = tuple(torch.zeros_like(part) for part in parts_of(draw_state(variant)))
    for state in (None, zeros if len(zeros) > 1 else zeros[0], draw_state(variant)):
        leaf, own = leaves(tensors), leaf_state(state)
        o, final = call(variant, leaf, initial_state=own, output_final_state=True)
        results = differentiable_results(variant, o, final)
        inputs = [*leaf.values(), *parts_of(own)]
        together = cotangents(results)

        def of(indices, results=results, inputs=inputs, together=together):
            made = torch.autograd.grad(
                [results[x] for x in indices],
                inputs,
                [together[x] for x in indices],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            assert all(x.isfinite().all() for x in made)
            return made

        every = of(range(len(results)))
        summed = [sum(x) for x in zip(*(of([i]) for i in range(len(results))), strict=True)]
        close(every, summed)


@every_operator
@pytest.mark.parametrize("cut", [0, 1, 4, 5])
def test_any_split_equals_one_call(variant, cut):
    """L05: gradients travel through the carried state."""

    def in_two(variant, tensors, *, initial_state, output_final_state):
        first = with_tokens(variant, tensors, 0, cut)
        then = with_tokens(variant, tensors, cut, 5)
        o, state = call(variant, first, initial_state=initial_state, output_final_state=True)
        more, state = call(variant, then, initial_state=state, output_final_state=True)
        return torch.cat([o, more], 1), state

    given = variant, draw(variant), draw_state(variant)
    close(gradients(*given, in_two), gradients(*given))


def test_stabiliser_has_no_gradient():
    variant = FIRST["mlstm"]
    _, (c, n, m) = call(variant, leaves(draw(variant)), output_final_state=True)
    assert c.requires_grad and n.requires_grad and not m.requires_grad
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    _, (c, n, m) = compiled(variant, leaves(draw(variant)), output_final_state=True)
    assert c.requires_grad and n.requires_grad and not m.requires_grad


@pytest.mark.parametrize("normalize", [None, True])
def test_detached_normalizer(normalize):
    """Equals autograd of numerator / constant; an option of the gradient alone."""
    gate = "exp" if normalize is None else "sigmoid"
    tensors = draw(FIRST["mlstm"])
    mlstm = functools.partial(onchip.torch.mlstm, gate=gate, normalize=normalize)
    o, _ = mlstm(**tensors)
    same(mlstm(**tensors, detach_normalizer=True)[0], o)
    leaf = leaves(tensors)
    got_o, _ = mlstm(**leaf, detach_normalizer=True)
    got = torch.autograd.grad(got_o.square().sum(), list(leaf.values()))
    # Without the denominator the operator is the sigmoid gate's numerator, whose weight may be any.
    numerator, _ = call(
        next(x for x in VARIANTS if x.op == "simple_gla" and x.id == "plain"),
        dict(
            q=leaf["q"],
            k=leaf["k"].repeat_interleave(2, 2)
            * (leaf["i"].exp() if gate == "exp" else leaf["i"].sigmoid())[..., None],
            v=leaf["v"],
            log_decay=torch.nn.functional.logsigmoid(leaf["f"]),
        )
        | dict(q=leaf["q"].repeat_interleave(2, 2)),
    )
    constant = (o / numerator).detach()
    want = torch.autograd.grad((numerator * constant).square().sum(), list(leaf.values()))
    close(got, want)


@every_operator
def test_without_grad_nothing_is_recorded(variant, monkeypatch):
    tensors = leaves(draw(variant))
    wanted, _ = call(variant, draw(variant))
    assert not wanted.requires_grad
    recorded, _ = call(variant, tensors)
    assert recorded.requires_grad
    same(recorded.detach(), wanted)

    def refuse(*_):
        raise AssertionError("the dispatcher was asked")

    monkeypatch.setattr(OPERATORS[variant.op], "forward_op", refuse)
    for without in (torch.no_grad(), torch.inference_mode()):
        with without:
            o, none = call(variant, tensors)
        assert not o.requires_grad and none is None
        same(o, wanted)


@every_operator
def test_only_the_wanted_gradients_are_computed(variant, monkeypatch):
    fixed = draw(variant)
    everything = dict(zip(fixed, gradients(variant, fixed, draw_state(variant)), strict=False))
    planned = []

    class Recorded:
        def __init__(self, operator, given):
            planned.append([x for x in given if x.startswith(("gradients.", "dinitial_state["))])
            self.call = Call(operator, given)

        def __getattr__(self, attribute):
            return getattr(self.call, attribute)

    Call = onchip._native.Call
    roles = OPERATORS[variant.op].row.tensors
    for name in fixed:
        tensors = fixed | {name: fixed[name].clone().requires_grad_()}
        o, final = call(
            variant, tensors, initial_state=draw_state(variant), output_final_state=True
        )
        results = differentiable_results(variant, o, final)
        results = [x for x in results if x.requires_grad]
        planned.clear()
        with monkeypatch.context() as patch:
            patch.setattr(onchip._native, "Call", Recorded)
            (gradient,) = torch.autograd.grad(results, [tensors[name]], cotangents(results))
        assert planned == [[f"gradients.{roles[name]}"]]
        same(gradient, everything[name])


def test_only_inputs_are_kept():
    variant = FIRST["gated_delta_rule"]
    tensors, kept = leaves(draw(variant)), []

    def pack(x):
        kept.append(x.data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        call(variant, tensors, output_final_state=True)
    assert sorted(kept) == sorted(x.data_ptr() for x in tensors.values())


def test_what_changed_in_between_is_noticed():
    variant = FIRST["simple_gla"]
    cu_seqlens = torch.tensor([0, 3, 8])
    o, _ = call(variant, leaves(draw(variant, lead=(8,))), cu_seqlens=cu_seqlens)
    cu_seqlens[1] = 5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_any_layout_of_the_cotangent():
    """L22: as a sum, a concatenation and a transposition make them."""
    variant = FIRST["gated_delta_rule"]
    leaf = leaves(draw(variant, torch.float32))

    def of(loss):
        return torch.autograd.grad(loss(call(variant, leaf)[0]), list(leaf.values()))

    weights = draw_tensor((2, 5, 4, 2), seed=9)
    ones = torch.ones_like(weights)
    all_same(of(lambda o: o.sum()), of(lambda o: (o * ones).sum()))
    wanted = of(lambda o: (o * weights).sum())
    wide = torch.cat([weights, weights], -1)
    all_same(of(lambda o: (torch.cat([o, o.detach()], -1) * wide).sum()), wanted)
    turned = weights.transpose(1, 3).contiguous()
    all_same(of(lambda o: (o.transpose(1, 3) * turned).sum()), wanted)


# ---- compilers, checkpoints, autocast


def loss(variant, tensors, state):
    first, *rest = tensors
    given = {first: 2 * tensors[first]} | {name: tensors[name] for name in rest}
    o, final = call(variant, given, initial_state=state, output_final_state=True)
    return sum(x.sin().sum() for x in differentiable_results(variant, o, final))


@every_operator
def test_compiled_gradients(variant):
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=False)
    results = []
    for function in (compiled, loss):
        tensors, state = leaves(draw(variant)), leaf_state(draw_state(variant))
        function(variant, tensors, state).backward()
        results.append([x.grad for x in (*tensors.values(), *parts_of(state))])
    close(*results)


@every_operator
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(variant, reentrant):
    def kept(variant, tensors, *, initial_state, output_final_state):
        def body(*arguments):
            parts = arguments[len(tensors) :]
            o, final = call(
                variant,
                dict(zip(tensors, arguments, strict=False)),
                initial_state=parts if len(parts) > 1 else parts[0],
                output_final_state=output_final_state,
            )
            return o, *parts_of(final)

        parts = parts_of(initial_state)
        o, *final = checkpoint(body, *tensors.values(), *parts, use_reentrant=reentrant)
        return o, tuple(final)

    given = variant, draw(variant), draw_state(variant)
    all_same(gradients(*given, kept), gradients(*given))


def test_selective_checkpointing_keeps_its_results(monkeypatch):
    variant = FIRST["simple_gla"]
    op, runs = OPERATORS["simple_gla"], []
    prepared = op.prepared_forward
    monkeypatch.setattr(op, "prepared_forward", lambda x: (runs.append(1), prepared(x))[1])

    def policy(context, operator, *_, **__):
        kept = operator is op.forward_op.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    leaf = leaves(draw(variant))
    body = lambda *x: call(variant, dict(zip(leaf, x, strict=True)))[0].sin()  # noqa: E731
    o = checkpoint(body, *leaf.values(), use_reentrant=False, context_fn=contexts)
    got = torch.autograd.grad(o.sum(), list(leaf.values()))
    assert len(runs) == 1
    all_same(got, torch.autograd.grad(body(*leaf.values()).sum(), list(leaf.values())))


def test_autocast_gives_gradients_their_own_dtype():
    variant = FIRST["gated_delta_rule"]
    tensors = leaves(draw(variant, torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        o, _ = call(variant, tensors)
    assert o.dtype == torch.bfloat16
    got = torch.autograd.grad(o.float().square().sum(), list(tensors.values()))
    assert {x.dtype for x in got} == {torch.float32}
    cast = {name: x.bfloat16() if name in "qkv" else x for name, x in tensors.items()}
    o, _ = call(variant, cast)
    all_same(got, torch.autograd.grad(o.float().square().sum(), list(tensors.values())))


# ---- torch.func, forward mode, second derivatives


@every_operator
def test_transforms(variant):
    tensors = draw(variant)

    def function(tensors):
        return loss(variant, tensors, None)

    leaf = leaves(tensors)
    wanted = torch.autograd.grad(function(leaf), list(leaf.values()))
    all_same(torch.func.grad(function)(tensors).values(), wanted)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_over_samples():
    """One sample at a time: vmap is correct, not fast."""
    variant = FIRST["mlstm"]
    samples = {name: torch.stack([x, x / 2]) for name, x in draw(variant).items()}

    def function(tensors):
        o, state = call(variant, tensors, output_final_state=True)
        return o.sum() + sum(part.sum() for part in state)

    each = [{name: x[index] for name, x in samples.items()} for index in range(2)]
    close(torch.vmap(function)(samples), torch.stack([function(x) for x in each]))
    got = torch.vmap(torch.func.grad(function))(samples)
    wanted = [torch.func.grad(function)(x) for x in each]
    for name, gradient in got.items():
        close(gradient, torch.stack([x[name] for x in wanted]))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_batches_of_cotangents():
    variant = FIRST["simple_gla"]
    leaf = leaves(draw(variant))
    o, state = call(variant, leaf, output_final_state=True)
    batches = [draw_tensor((3, *x.shape), torch.float64, seed) for seed, x in enumerate((o, state))]
    inputs = list(leaf.values())
    got = torch.autograd.grad((o, state), inputs, batches, is_grads_batched=True, retain_graph=True)
    each = [
        torch.autograd.grad((o, state), inputs, pair, retain_graph=True)
        for pair in zip(*batches, strict=True)
    ]
    all_same(got, [torch.stack(x) for x in zip(*each, strict=True)])


@every_operator
def test_second_derivatives_are_refused(variant):
    leaf = leaves(draw(variant))
    words = f"{variant.op} has no second derivative"
    with pytest.raises(onchip.Unsupported, match=words):
        torch.autograd.grad(call(variant, leaf)[0].sum(), list(leaf.values()), create_graph=True)
    first = next(iter(leaf))

    def gradient(x):
        given = {name: y.detach() for name, y in leaf.items()}
        return torch.func.grad(lambda y: call(variant, given | {first: y})[0].sum())(x)

    with pytest.raises(onchip.Unsupported, match=words):
        torch.func.grad(lambda x: gradient(x).sum())(leaf[first].detach())


@pytest.mark.filterwarnings(JIT_DEPRECATED)
def test_forward_mode_is_refused():
    variant = FIRST["simple_gla"]
    tensors = draw(variant)
    for grad in (False, True):
        with forward_ad.dual_level(), torch.set_grad_enabled(grad):
            dual = forward_ad.make_dual(tensors["k"], torch.ones_like(tensors["k"]))
            with pytest.raises(onchip.Unsupported, match="no forward-mode derivative"):
                call(variant, tensors | dict(k=dual))
    with pytest.raises(onchip.Unsupported, match="no forward-mode derivative"):
        torch.func.jvp(
            lambda k: call(variant, tensors | dict(k=k))[0], (tensors["k"],), (tensors["k"],)
        )
