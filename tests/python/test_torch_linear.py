"""onchip.torch's linear operators on CPU tensors: results, refusals, registration."""

import inspect

import numpy as np
import pytest

import onchip

torch = pytest.importorskip("torch")
import linear_cases  # noqa: E402
from linear_cases import VARIANTS, variant_id  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch_cases import DTYPES, same  # noqa: E402
from torch_linear_cases import (  # noqa: E402
    as_state,
    as_tensor,
    call,
    draw,
    draw_state,
    parts_of,
    plain,
)

import onchip.torch  # noqa: E402
from onchip._linear import calls  # noqa: E402
from onchip.torch._linear import OPERATORS  # noqa: E402

JIT_DEPRECATED = "ignore:`torch.jit.script` is deprecated"  # PyTorch's own use of it
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
FIRST = {variant.op: variant for variant in reversed(VARIANTS)}
every_operator = pytest.mark.parametrize("variant", FIRST.values(), ids=variant_id)
PACKED = dict(cu_seqlens=torch.tensor([0, 3, 3, 8]), seqlens=[3, 0, 4])


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Results and workspace start as NaN: what a kernel fails to write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def all_same(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        same(one, other)


def close(got, wanted, tolerance=1e-10):
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def split_call(variant, tensors, phase="", **options):
    o, state = call(variant, tensors, phase, output_final_state=True, **options)
    return o, *parts_of(state)


# ---- results


def test_every_row_of_the_table_is_a_function():
    for row in calls.ROWS:
        for name in (row.name, f"{row.name}_step"):
            function = getattr(onchip.torch, name)
            assert name in onchip.torch.__all__
            assert function.__name__ == name and function.__doc__
            ours = inspect.signature(function).parameters
            theirs = getattr(onchip.ops, name if name.endswith("_step") else f"{name}_forward")
            more = {"detach_normalizer"} if name == "mlstm" else set()
            theirs = inspect.signature(theirs).parameters
            assert set(ours) == set(theirs) | more
            assert all(ours[x].default == theirs[x].default for x in theirs)
            assert all(ours[x].kind == theirs[x].kind for x in theirs)


@every_variant
def test_equals_a_plain_loop(variant):
    for layout in ("kv", "vk"):
        tensors, state = draw(variant), draw_state(variant, layout=layout)
        o, *final = split_call(variant, tensors, initial_state=state, **variant.with_layout(layout))
        wanted, wanted_final = plain(variant, tensors, state, layout=layout)
        close(o, wanted)
        for part, want in zip(final, wanted_final, strict=True):
            close(part, want)


@every_operator
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_operator_on_arrays(variant, dtype):
    """Whose accuracy is judged elsewhere, on every backend."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tensors = draw(variant, dtype, lead=(8,))
    state = draw_state(variant, 3, dtype=wide)
    options = dict(initial_state=state, output_final_state=True, chunk_len=16, **PACKED)
    got, final = call(variant, tensors, **options)
    want, want_final = linear_cases.forward(None, variant, tensors, **options)
    same(got, want)
    all_same(parts_of(final), parts_of(want_final))
    forced, none = call(variant, tensors, backend="reference", **PACKED)
    assert none is None and forced.dtype == dtype


@every_variant
def test_step_by_step(variant):
    """In place, on slots of a pool; -1 leaves a row out."""
    tensors, state = draw(variant), draw_state(variant)
    wanted, *final = split_call(variant, tensors, initial_state=state)
    pool = tuple(part.new_full((4, *part.shape[1:]), 7.0) for part in parts_of(state))
    for part, own in zip(pool, parts_of(state), strict=True):
        part[[2, 0]] = own
    pool = pool if isinstance(state, tuple) else pool[0]
    rows = []
    for t in range(wanted.shape[1]):
        one = linear_cases.token(variant, tensors, t)
        rows.append(call(variant, one, "_step", state=pool, state_indices=[2, 0]))
    close(torch.stack(rows, 1), wanted)
    for part, want in zip(parts_of(pool), final, strict=True):
        close(part[[2, 0]], want)
        assert (part[[1, 3]] == 7.0).all()
    skipped = call(variant, one, "_step", state=pool, state_indices=torch.tensor([-1, -1]).int())
    assert not skipped.any()


@every_operator
def test_any_layout(variant):
    tensors = draw(variant, torch.float32)
    wanted = split_call(variant, tensors)
    for change in (
        lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
        lambda x: torch.cat([x, x.new_full(x.shape, float("nan"))], -1)[..., : x.shape[-1]],
        lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,
    ):
        all_same(split_call(variant, {name: change(x) for name, x in tensors.items()}), wanted)


def test_lengths_may_be_lists():
    variant = FIRST["simple_gla"]
    tensors = draw(variant, lead=(8,))
    lists = dict(cu_seqlens=[0, 3, 3, 8], seqlens=(3, 0, 4))
    all_same(split_call(variant, tensors, **lists), split_call(variant, tensors, **PACKED))
    with pytest.raises(onchip.InvalidArgument, match="simple_gla_forward: cu_seqlens: got"):
        call(variant, tensors, cu_seqlens=["a"])


@every_operator
def test_autocast_casts_operands_alone(variant):
    tensors = draw(variant, torch.float32)
    kinds = OPERATORS[variant.op].signature.operands
    cast = {name: x.bfloat16() if name in kinds else x for name, x in tensors.items()}
    wanted = split_call(variant, cast)
    step = linear_cases.token(variant, tensors, 0)
    cast_step = linear_cases.token(variant, cast, 0)
    with torch.autocast("cpu", torch.bfloat16):
        got = split_call(variant, tensors)
        pool = draw_state(variant, dtype=torch.float32)
        o = call(variant, step, "_step", state=pool)
        exact = split_call(variant, draw(variant))
    all_same(got, wanted)
    assert got[0].dtype == torch.bfloat16 and got[1].dtype == torch.float32
    same(o, call(variant, cast_step, "_step", state=draw_state(variant, dtype=torch.float32)))
    assert exact[0].dtype == torch.float64


# ---- refusals


def test_refusals_are_onchips_own():
    q, k, v = (torch.randn(2, 5, 2, 4) for _ in range(3))
    gate = -torch.rand(2, 5, 2)
    simple_gla = onchip.torch.simple_gla
    state = torch.zeros(2, 2, 4, 4)
    refused = [
        (dict(k=k.double()), "simple_gla_forward: k"),
        (dict(k=None), "simple_gla_forward: k: got None, wanted a torch tensor"),
        (dict(q=q.numpy()), "simple_gla_forward: q: got ndarray, wanted a torch tensor"),
        (dict(log_decay=gate[..., :1]), "simple_gla_forward: log_decay: got shape"),
        (dict(state_layout="vv"), "simple_gla_forward: state_layout"),
        (dict(initial_state=(state, state)), "initial_state: got 2 parts, wanted a tensor"),
        (dict(initial_state=()), "initial_state: got 0 parts, wanted a tensor"),
        (dict(initial_state=[[0.0]]), "initial_state.0.: got list"),
        (dict(output_final_state="no"), "simple_gla_forward: output_final_state: got 'no'"),
        (dict(output_final_state=2), "simple_gla_forward: output_final_state: got 2"),
        (dict(initial_state=state[:1]), "simple_gla_forward: initial_state"),
        (dict(backend="gpu"), "simple_gla_forward: backend"),
        (dict(chunk_len=7), "simple_gla_forward: chunk_len"),
        (dict(check=True, log_decay=-gate), "simple_gla_forward: log_decay: got 0"),
    ]
    for change, words in refused:
        with pytest.raises(onchip.InvalidArgument, match=words):
            simple_gla(**(dict(q=q, k=k, v=v, log_decay=gate) | change))
    with pytest.raises(onchip.Error, match=r"cuda\.sm90"):
        simple_gla(q, k, v, gate, backend="cuda.sm90")
    with pytest.raises(onchip.InvalidArgument, match="got 4 parts, wanted a tuple of 1 to 3"):
        onchip.torch.mlstm(q, k, v, gate, gate, initial_state=(state,) * 4)
    for arguments, words in (
        (((q, k), {}), "missing a required argument: 'v'"),
        (((q, k, v, gate, gate), {}), "too many positional arguments"),
        (((q, k, v, gate), dict(q=q)), "multiple values for argument 'q'"),
        (((q, k, v, gate), dict(causal=True)), "unexpected keyword argument 'causal'"),
    ):
        with pytest.raises(TypeError, match=words):
            simple_gla(*arguments[0], **arguments[1])


def test_a_step_refuses_gradients_and_copies():
    variant = FIRST["mlstm"]
    one, pool = linear_cases.token(variant, draw(variant), 0), draw_state(variant)
    one["i"] = one["i"].clone().requires_grad_()
    with pytest.raises(onchip.Unsupported, match=r"mlstm_step: .* requires grad"):
        call(variant, one, "_step", state=pool)
    with torch.no_grad():
        call(variant, one, "_step", state=pool)
    turned = (pool[0].mT.contiguous().mT, *pool[1:])
    with torch.no_grad(), pytest.raises(onchip.InvalidArgument, match="written in place"):
        call(variant, one, "_step", state=turned)
    with torch.no_grad(), pytest.raises(onchip.InvalidArgument, match="state"):
        call(variant, one, "_step", state=None)


@every_operator
def test_a_graph_that_keeps_a_state_notices_the_step(variant):
    one, pool = linear_cases.token(variant, draw(variant), 0), draw_state(variant)
    for part in parts_of(pool):
        kept = (torch.ones_like(part, requires_grad=True) * part).sum()
        call(variant, one, "_step", state=pool)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()


# ---- the registered operators


def defaults_of(function, names):
    parameters = inspect.signature(function).parameters
    return {name: parameters[name].default for name in names}


def operator_arguments(variant, tensors, state=None, **options):
    """Of forward, by its schema."""
    op = OPERATORS[variant.op]
    given = dict.fromkeys(op.tensors) | dict(tensors)
    given |= zip(op.signature.differentiable[len(op.row.tensors) :], parts_of(state), strict=False)
    given |= defaults_of(getattr(onchip.ops, f"{variant.op}_backward"), op.options)
    given |= dict(variant.options) | dict(output_final_state=True) | options
    return tuple(given.get(name) for name in (*op.tensors, *op.options, "output_final_state"))


@every_operator
def test_opcheck(variant):
    op = OPERATORS[variant.op]
    tensors, state = draw(variant, lead=(8,)), draw_state(variant, 3)
    lengths = dict(PACKED, seqlens=torch.tensor(PACKED["seqlens"]))
    arguments = operator_arguments(variant, tensors, state, **lengths)
    torch.library.opcheck(op.forward_op, arguments)
    leaf = [
        x.clone().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for x in arguments
    ]
    torch.library.opcheck(op.forward_op, tuple(leaf))
    one, pool = linear_cases.token(variant, draw(variant), 0), draw_state(variant)
    given = {"state_indices": None} | one | dict(variant.options)
    given |= zip(op.signature.step_tensors[len(op.row.tensors) : -1], parts_of(pool), strict=False)
    step = getattr(onchip.ops, f"{variant.op}_step")
    given = defaults_of(step, op.signature.step_options) | given
    names = (*op.signature.step_tensors, *op.signature.step_options)
    torch.library.opcheck(op.step_op, tuple(given.get(name) for name in names))


@every_variant
def test_fake_results_are_like_the_real_ones(variant):
    from torch._subclasses import FakeTensorMode

    for dtype, layout in ((torch.float64, "kv"), (torch.bfloat16, "vk")):
        tensors = draw(variant, dtype)
        real = split_call(variant, tensors, **variant.with_layout(layout))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = {name: mode.from_tensor(x) for name, x in tensors.items()}
            made = split_call(variant, fakes, **variant.with_layout(layout))
        for a, b in zip(made, real, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_meta_tensors():
    variant = FIRST["mlstm"]
    o, c, n, m = split_call(variant, {k: x.to("meta") for k, x in draw(variant).items()})
    assert (o.device.type, o.shape) == ("meta", (2, 5, 4, 2))
    assert (c.shape, n.shape, m.shape) == ((2, 4, 3, 2), (2, 4, 3), (2, 4))


@every_operator
def test_whoever_watches_sees_the_operators(variant):
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen = []
    tensors, pool = draw(variant), draw_state(variant)
    wanted = split_call(variant, tensors)
    with Watch():
        got = split_call(variant, tensors)
        call(variant, linear_cases.token(variant, tensors, 0), "_step", state=pool)
    assert f"onchip.{variant.op}_forward.default" in seen
    assert f"onchip.{variant.op}_step.default" in seen
    all_same(got, wanted)


# ---- torch.compile


def block(variant, tensors, **options):
    """With work before and after, and every result used."""
    first, *rest = tensors
    given = {first: 2 * tensors[first]} | {name: tensors[name] for name in rest}
    o, *state = split_call(variant, given, **options)
    return o.sin(), *(part.sum(-1) for part in state)


@every_operator
def test_compiled_without_a_graph_break(variant):
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=False)
    state = draw_state(variant)
    for got, wanted in zip(
        compiled(variant, draw(variant), initial_state=state),
        block(variant, draw(variant), initial_state=state),
        strict=True,
    ):
        close(got, wanted)


def test_one_graph_serves_every_length():
    torch._dynamo.reset()
    variant = FIRST["gated_delta_rule"]
    counter = CompileCounterWithBackend("aot_eager")

    def function(q, k, v, gate, beta):
        return onchip.torch.gated_delta_rule(q, k, v, gate, beta, output_final_state=True)

    compiled = torch.compile(function, backend=counter)
    for length in (5, 9, 33):
        sizes = linear_cases.Sizes(batch=1, length=length)
        tensors = list(draw(variant, sizes=sizes).values())
        for x in tensors:
            torch._dynamo.mark_dynamic(x, 1)
        all_same(compiled(*tensors), function(*tensors))
    assert counter.frame_count == 1


@every_operator
def test_a_compiled_step_writes_its_state(variant):
    torch._dynamo.reset()
    tensors = linear_cases.token(variant, draw(variant), 0)

    def twice(tensors, *pool):
        pool = pool if len(pool) > 1 else pool[0]
        before = [part.sum() for part in parts_of(pool)]
        o = call(variant, tensors, "_step", state=pool)
        return call(variant, tensors, "_step", state=pool) + o, before

    pools = [parts_of(draw_state(variant)) for _ in range(2)]
    with torch.no_grad():
        compiled = torch.compile(twice, fullgraph=True, backend="aot_eager", dynamic=False)
        got, sums = compiled(tensors, *pools[0])
        wanted, wanted_sums = twice(tensors, *pools[1])
    close(got, wanted)
    close(sums, wanted_sums)
    for one, other in zip(*pools, strict=True):
        close(one, other)


@pytest.mark.filterwarnings("default")  # of PyTorch's own
def test_compiled_by_inductor():
    torch._dynamo.reset()
    variant = FIRST["mlstm"]
    got = torch.compile(block, fullgraph=True)(variant, draw(variant))
    for a, b in zip(got, block(variant, draw(variant)), strict=True):
        close(a, b)


@pytest.mark.filterwarnings(JIT_DEPRECATED)
def test_exported():
    class Module(torch.nn.Module):
        def forward(self, q, k, v, gate):
            return onchip.torch.gla(q, k, v, gate, output_final_state=True)

    tensors = tuple(draw(FIRST["gla"]).values())
    program = torch.export.export(Module(), tensors)
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("onchip.gla_forward.default") == 1
    all_same(program.module()(*tensors), Module()(*tensors))


def test_states_of_the_operator_on_arrays_are_taken():
    """NumPy's state after its forward, as tensors: the same layout of parts."""
    variant = FIRST["mlstm"]
    rng = np.random.default_rng(0)
    arrays = linear_cases.draw(rng, variant)
    _, state = linear_cases.forward(None, variant, arrays, output_final_state=True)
    tensors = {name: as_tensor(x) for name, x in arrays.items()}
    o, _ = call(variant, tensors, initial_state=as_state(state))
    want, _ = linear_cases.forward(None, variant, arrays, initial_state=state)
    assert np.array_equal(o.numpy(), want)
