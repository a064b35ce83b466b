"""onchip.torch on CPU tensors: the same code serves CUDA tensors (test_torch_cuda.py)."""

import re
import threading
from pathlib import Path

import numpy as np
import pytest

import onchip

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch_cases import (  # noqa: E402
    CASES,
    DTYPES,
    PACKED,
    as_operator_arguments,
    dense,
    draw,
    packed,
    same,
)

import onchip.torch  # noqa: E402
from onchip.torch import attention  # noqa: E402

ROOT = Path(__file__).parents[2]
OPERATOR = "onchip.attention_forward.default"


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Results and workspace start as NaN: what a kernel fails to write shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.ones(1).new_empty((3,)).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=CASES)
def case(request):
    make, options = CASES[request.param]
    return make, options


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("forced", ["cpu", "reference", None])
def test_equals_the_operator_on_arrays(case, dtype, forced):
    make, options = case
    tensors = make(dtype)
    o, lse = attention(*tensors, **options, backend=forced, return_lse=True)
    wanted_o, wanted_lse = onchip.ops.attention_forward(*tensors, **options, backend=forced)
    same(o, wanted_o)
    same(lse, wanted_lse)
    same(attention(*tensors, **options, backend=forced), wanted_o)
    assert o.is_contiguous() and lse.is_contiguous()


def test_sequences_of_integers():
    tensors = packed()
    lists = {name: value.tolist() for name, value in PACKED.items()}
    options = dict(dropout_p=0.5)
    o = attention(*tensors, **lists, **options, dropout_rng=(-(2**63), 7))
    wanted = attention(*tensors, **PACKED, **options, dropout_rng=torch.tensor([-(2**63), 7]))
    same(o, wanted)
    with torch.device("meta"):  # lists lie in host memory, whatever the default device is
        same(attention(*tensors, **lists, **options, dropout_rng=(-(2**63), 7)), wanted)
    for wrong in ([0, 2**63], ["a", "b"], [0.5, 1.5], np.arange(2)):
        with pytest.raises(onchip.InvalidArgument, match="attention_forward: cu_seqlens_q: got"):
            attention(*tensors, cu_seqlens_q=wrong)


@pytest.mark.parametrize("which", range(3))
def test_any_layout(which):
    """Innermost strides other than 1, stride 0, offsets, and memory that holds the negatives."""
    tensors = list(dense(torch.float32))
    wanted = attention(*tensors, return_lse=True)
    x = tensors[which]
    variants = [
        x.transpose(1, 3).contiguous().transpose(1, 3),
        x.transpose(1, 2).contiguous().transpose(1, 2),
        torch.cat([x, x.new_full(x.shape, float("nan"))], -1)[..., : x.shape[-1]],
        torch.complex(torch.zeros_like(x), -x).conj().imag,
    ]
    assert variants[-1].is_neg()
    for variant in variants:
        tensors[which] = variant
        for got, want in zip(attention(*tensors, return_lse=True), wanted, strict=True):
            same(got, want)
    tensors[which] = x[:1].expand(2, -1, -1, -1)
    repeated = attention(*tensors)
    tensors[which] = tensors[which].contiguous()
    same(repeated, attention(*tensors))


def test_no_elements():
    q, k, v = dense()
    o, lse = attention(q, k[:, :0], v[:, :0], return_lse=True)
    assert o.shape == (2, 33, 4, 24) and not o.any() and torch.isneginf(lse).all()
    assert attention(q[:, :0], k, v).shape == (2, 0, 4, 24)


# ---- refusals


def test_refusals_are_onchips_own():
    q, k, v = dense()
    refused = [
        (dict(window=3), "attention_forward: window: got 3"),
        (dict(window=(1, 2, 3)), "attention_forward: window"),
        (dict(causal="yes"), "attention_forward: causal: got 'yes'"),
        (dict(alignment="left"), "attention_forward: alignment"),
        (dict(window={1, 2}), "attention_forward: window: got set, wanted"),
        (dict(mask=np.ones((1, 1, 33, 45), bool)), "mask: got ndarray, wanted a torch tensor"),
        (dict(bias=draw((2, 4, 33, 44))), "attention_forward: bias"),
        (dict(backend="gpu"), "attention_forward: backend"),
        (dict(k=k.double()), "attention_forward: k"),
        (dict(v=v[0]), "attention_forward: v"),
        (dict(q=q[0, 0]), "attention_forward: q"),
        (dict(q=q.to(torch.complex64)), "attention_forward: q: got dtype complex64"),
        (dict(k=None), "k: got None, wanted a torch tensor"),
        (dict(q=q.numpy()), "q: got ndarray, wanted a torch tensor"),
    ]
    for change, words in refused:
        with pytest.raises(onchip.InvalidArgument, match=words):
            attention(**(dict(q=q, k=k, v=v) | change))
    with pytest.raises(onchip.Unsupported, match=r"cuda\.sm90: the tensors are on cpu"):
        attention(q, k, v, backend="cuda.sm90")


# ---- the registered operator


def test_opcheck(case):
    make, options = case
    arguments = as_operator_arguments(make(), options)
    torch.library.opcheck(torch.ops.onchip.attention_forward, arguments)


def test_fake_results_are_like_the_real_ones(case):
    """Shapes, dtypes, strides; also of the inputs in another order."""
    from torch._subclasses import FakeTensorMode

    make, options = case
    for dtype in DTYPES:
        for change in (lambda x: x, lambda x: x.mT.contiguous().mT):
            tensors = [change(x) for x in make(dtype)]
            real = attention(*tensors, **options, return_lse=True)
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fakes = [mode.from_tensor(x) for x in tensors]
                made = attention(*fakes, **options, return_lse=True)
            for a, b in zip(made, real, strict=True):
                assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
                assert a.device == b.device


def test_meta_tensors():
    o, lse = attention(*(x.to("meta") for x in dense()), return_lse=True)
    assert (o.device.type, o.shape, lse.shape) == ("meta", (2, 33, 4, 24), (2, 4, 33))


def test_whoever_watches_sees_the_operator():
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen = []
    tensors = dense()
    wanted = attention(*tensors)
    with Watch():
        got = attention(*tensors)
    assert OPERATOR in seen
    same(got, wanted)


def test_a_subclass_of_tensor_sees_the_operator():
    from torch.utils._pytree import tree_map

    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*tree_map(lambda x: x.inner if isinstance(x, cls) else x, args))

    seen = []
    tensors = dense()
    same(attention(*(Wrapped(x) for x in tensors)), attention(*tensors))
    assert seen == [OPERATOR]


# ---- torch.compile


def block(q, k, v, options):
    """With work before and after, and both results used."""
    o, lse = attention(2 * q, k, v, **options, return_lse=True)
    return (o * lse.movedim(-2, -1).unsqueeze(-1).nan_to_num(0, 0, 0)).sum(-1), o


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_graph_break(case, dynamic):
    make, options = case
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for got, wanted in zip(compiled(*make(), options), block(*make(), options), strict=True):
        torch.testing.assert_close(got, wanted)


def test_one_graph_serves_every_length():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True), backend=counter)
    for length in (5, 9, 33, 120):
        q, k, v = (draw((1, length, 2, 8), seed=seed) for seed in range(3))
        torch._dynamo.mark_dynamic(q, 1)
        torch._dynamo.mark_dynamic(k, 1)
        torch._dynamo.mark_dynamic(v, 1)
        same(compiled(q, k, v), attention(q, k, v, causal=True))
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("default")  # of PyTorch's own
def test_compiled_by_inductor():
    torch._dynamo.reset()
    tensors, options = dense(), dict(causal=True, seqlens_kv=[45, 3])
    got = torch.compile(block, fullgraph=True)(*tensors, options)
    for a, b in zip(got, block(*tensors, options), strict=True):
        torch.testing.assert_close(a, b)


def test_exported():
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, window=(3, 3))

    tensors = dense()
    program = torch.export.export(Module(), tensors)
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count(OPERATOR) == 1
    same(program.module()(*tensors), Module()(*tensors))


# ---- documents


@pytest.mark.parametrize("page", ["README.md", "docs/torch.md"])
def test_examples_in_documents_run(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert any("onchip.torch" in block for block in blocks)
    for block in blocks:
        exec(compile(block, page, "exec"), {})


# ---- threads


def test_many_threads():
    inputs = [dense(dtype) for dtype in DTYPES] * 2
    wanted = [attention(*x, causal=True) for x in inputs]
    failures = []

    def work(index):
        try:
            for _ in range(20):
                same(attention(*inputs[index], causal=True), wanted[index])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
