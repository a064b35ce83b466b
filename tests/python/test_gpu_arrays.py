"""Arrays on a GPU, of every library, through onchip.ops and onchip.torch on cuda.sm90."""

import threading

import numpy as np
import pytest
from harness import BFLOAT16, assert_same_bits, check_forward, draw, dtype_name

import gpu
import onchip
from gpu import to_numpy, to_torch
from onchip.oracle import compare

pytestmark = [pytest.mark.gpu, gpu.needed]

LONG = 3000  # of keys: long enough for a caller to overtake the kernel
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def attention():
    import onchip.torch

    return onchip.torch.attention


def inputs(dtype=BFLOAT16, seed=0, shape=(2, 200, 4, 64)):
    rng = np.random.default_rng(seed)
    return [draw(rng, shape, dtype) for _ in range(3)]


def same(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# ---- what the kernel must take


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16], ids=dtype_name)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (8, 8), (72, 40), (128, 64), (64, 128)])
@pytest.mark.parametrize("mask", ["full", "causal", "top_left"])
def test_every_spec(dims, mask, dtype):
    rng = np.random.default_rng(dims[0])
    options = dict(causal=mask != "full")
    if mask == "top_left":
        options["alignment"] = "top_left"
    for heads, lengths in [((4, 4), (130, 257)), ((6, 2), (257, 130)), ((3, 1), (1, 65))]:
        q = draw(rng, (2, lengths[0], heads[0], dims[0]), dtype)
        k = draw(rng, (2, lengths[1], heads[1], dims[0]), dtype)
        v = draw(rng, (2, lengths[1], heads[1], dims[1]), dtype)
        used = dict(seqlens_q=np.array([lengths[0], 1]), seqlens_kv=np.array([0, lengths[1]]))
        for more in ({}, used, dict(scale=0.37), dict(batch_invariant=True)):
            check_forward(gpu.BACKEND, q, k, v, **options, **more)
        cu = dict(
            cu_seqlens_q=np.array([0, 7, 7, lengths[0] * 2]).clip(max=lengths[0] * 2),
            cu_seqlens_kv=np.array([0, 30, 64, lengths[1] * 2], np.int32),
        )
        flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
        check_forward(gpu.BACKEND, *flat, **options, **cu)


REFUSED = {
    "float32": (dict(dtype=np.float32), {}, "dtype: got float32"),
    "float64": (dict(dtype=np.float64), {}, "dtype: got float64"),
    "head_dim": (dict(shape=(1, 9, 2, 136)), {}, "head_dim_qk: got 136, wanted at most 128"),
    "head_dim_v": (dict(shape=(1, 9, 2, 12)), {}, "multiple"),
    "softcap": ({}, dict(softcap=2.0), "softcap"),
    "window": ({}, dict(window=(3, 5)), "window"),
    "sink": ({}, dict(sink=np.zeros(4, np.float32)), "sink"),
    "bias": ({}, dict(bias=np.zeros((1, 1, 1, 200), np.float32)), "bias"),
    "mask": ({}, dict(mask=np.ones((1, 1, 1, 200), bool)), "mask"),
    "dropout": ({}, dict(dropout_p=0.5, dropout_rng=(1, 2)), "dropout"),
    "alibi": ({}, dict(alibi_slopes=np.ones(4, np.float32)), "alibi_slopes"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_kernel_has_not_is_refused_by_name(what):
    made, options, words = REFUSED[what]
    tensors = [to_torch(x) for x in inputs(**made)]
    options = {n: to_torch(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    with pytest.raises(onchip.Unsupported, match=f"cuda.sm90: .*{words}"):
        onchip.ops.attention_forward(*tensors, **options, backend=gpu.BACKEND)


def test_it_is_the_one_that_is_picked():
    tensors = [to_torch(x) for x in inputs()]
    text = onchip.explain("attention_forward", *tensors, causal=True)
    assert text.startswith("attention_forward: cuda.sm90\n"), text
    same(
        onchip.ops.attention_forward(*tensors),
        onchip.ops.attention_forward(*tensors, backend=gpu.BACKEND),
    )


def test_bad_lengths_on_the_device_are_made_safe():
    q, k, v = (to_torch(x.reshape(400, 4, 64)) for x in inputs())
    for cu in ([-5, 130, 90, 260, 9000], [0, 2**31 - 1, 5, 400, 400]):
        device = torch.tensor(cu, device="cuda")
        safe = np.maximum.accumulate(np.clip(cu, 0, 400)).tolist()
        got = onchip.ops.attention_forward(q, k, v, cu_seqlens_q=device)
        same(got, onchip.ops.attention_forward(q, k, v, cu_seqlens_q=safe))


# ---- streams


def test_ops_use_torchs_current_stream(attention):
    """The producer's work and the reader's are on one side stream, with no other order."""
    rng = np.random.default_rng(1)
    q, k, v = (to_torch(draw(rng, (1, LONG, 16, 128), BFLOAT16)) for _ in range(3))
    wanted = attention(q, k, v, return_lse=True)
    torch.cuda.synchronize()
    for call in (
        lambda *x: onchip.ops.attention_forward(*x),
        lambda *x: attention(*x, return_lse=True),
    ):
        stream = torch.cuda.Stream()
        for _ in range(5):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
                late = [x.clone() for x in (q, k, v)]
                results = [x.clone() for x in call(*late)]
                del late  # the allocator may hand their memory out again on this stream
                torch.full_like(q, float("nan"))
            stream.synchronize()
            same(results, wanted)


def test_no_call_waits_for_the_gpu(attention):
    q, k, v = (to_torch(x) for x in inputs())
    cu = torch.tensor([0, 100, 400], dtype=torch.int32, device="cuda")
    flat = [x.reshape(-1, 4, 64) for x in (q, k, v)]
    attention(q, k, v)
    attention(*flat, cu_seqlens_q=cu)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    done = torch.cuda.Event()
    for _ in range(20):
        attention(q, k, v, return_lse=True)
        attention(*flat, cu_seqlens_q=cu)
        onchip.ops.attention_forward(q, k, v)
    done.record()
    assert not done.query()
    torch.cuda.synchronize()


# ---- CUDA graphs


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_graph_replays_with_changed_inputs(attention, packed, dtype):
    shape = (700, 4, 64) if packed else (2, 350, 4, 64)
    q, k, v = (torch.empty(shape, dtype=dtype, device="cuda").normal_() for _ in range(3))
    options = dict(causal=True)
    if packed:
        options["cu_seqlens_q"] = torch.tensor([0, 1, 300, 700], device="cuda")
    attention(q, k, v, **options, return_lse=True)  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attention(2 * q, k, v, **options, return_lse=True)
    for replay in range(100):
        for x in (q, k, v):
            x.normal_()
        if packed:
            options["cu_seqlens_q"][1] = replay
        graph.replay()
        same(results, attention(2 * q, k, v, **options, return_lse=True))


def workspace_bytes(tensors, **options):
    stream = torch.cuda.current_stream().cuda_stream
    views = {
        name: onchip._native.tensor("attention_forward", name, x, None, name == "o", stream)
        for name, x in tensors.items()
    }
    call = onchip._native.Call("attention_forward", views | options | {"backend": gpu.BACKEND})
    call.plan()
    return call.workspace_bytes


@pytest.mark.parametrize("shape", [(2, 130, 2100, 4), (1, 64, 4096, 1)], ids=str)
def test_graph_replays_with_tiles_shared_out_by_keys(attention, shape):
    """A replay counts the parts of a tile in words that the one before has left, under the same
    number of a launch."""
    batch, rows, keys, heads = shape
    q, k, v = (
        torch.empty(batch, n, heads, 128, dtype=torch.bfloat16, device="cuda").normal_()
        for n in (rows, keys, keys)
    )
    tensors = dict(q=q, k=k, v=v, o=torch.empty_like(q))
    parts = workspace_bytes(tensors) - workspace_bytes(tensors, batch_invariant=True)
    assert parts > 4 * batch * rows * heads * 128  # O in fp32, of two parts a tile or more
    attention(q, k, v)  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attention(2 * q, k, v, return_lse=True)
    for _ in range(100):
        for x in (q, k, v):
            x.normal_()
        for x in results:
            x.fill_(float("nan"))
        graph.replay()
        same(results, attention(2 * q, k, v, return_lse=True))
    wanted = [x.clone() for x in results]
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        graph.replay()
        for a, b in zip(results, wanted, strict=True):
            differing += (a != b).sum()
    assert int(differing) == 0


def test_a_captured_call_may_be_the_first_of_its_kernel():
    """In a process of its own, where nothing is loaded yet."""
    import subprocess
    import sys

    code = """
import torch, onchip.torch
q = torch.randn(1, 300, 2, 128, device="cuda").half()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    o = onchip.torch.attention(q, q, q)
graph.replay()
got = o.clone()
assert torch.equal(got, onchip.torch.attention(q, q, q))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.filterwarnings("default")  # that the graph is empty
def test_lengths_in_host_memory_cannot_be_captured(attention):
    q, k, v = (to_torch(x.reshape(400, 4, 64)) for x in inputs())
    attention(q, k, v, cu_seqlens_q=[0, 10, 400])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(onchip.Unsupported, match="host memory while the stream is being captured"),
        torch.cuda.graph(graph),
    ):
        attention(q, k, v, cu_seqlens_q=[0, 10, 400])
    torch.cuda.synchronize()
    after = attention(q, k, v, cu_seqlens_q=[0, 10, 400])
    same((after,), (attention(q, k, v, cu_seqlens_q=[0, 10, 400]),))


# ---- torch's own machinery


@pytest.mark.filterwarnings("default")  # of PyTorch's own
def test_opcheck(attention):
    from torch_cases import as_operator_arguments

    tensors = [to_torch(x) for x in inputs(shape=(1, 70, 4, 64))]
    flat = [x[0] for x in tensors]
    cu = torch.tensor([0, 30, 70], device="cuda")
    for given, options in ((tensors, dict(causal=True)), (flat, dict(cu_seqlens_q=cu))):
        torch.library.opcheck(
            torch.ops.onchip.attention_forward, as_operator_arguments(given, options)
        )


@pytest.mark.filterwarnings("default")  # of PyTorch's own
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(attention, mode):
    def block(q, k, v):
        o, lse = attention(q * 2, k, v, causal=True, return_lse=True)
        return o + 1, lse * 2

    torch._dynamo.reset()
    tensors = [to_torch(x) for x in inputs()]
    compiled = torch.compile(block, fullgraph=True, mode=mode)
    wanted = [x.clone() for x in block(*tensors)]
    for _ in range(4):
        got = [x.clone() for x in compiled(*tensors)]
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b)


def test_a_gradient_is_refused_by_the_operator_that_gives_it(attention):
    q, k, v = (to_torch(x) for x in inputs())
    q.requires_grad_()
    o = attention(q, k, v)
    with torch.no_grad():
        same([o.detach()], [attention(q, k, v)])
    with pytest.raises(onchip.Unsupported, match=r"^attention_backward: "):
        o.sum().backward()


def test_other_signatures(attention):
    from onchip.compat.flash_attn import flash_attn_func

    q, k, v = (to_torch(x) for x in inputs())
    wanted = attention(q, k, v, causal=True)
    same([flash_attn_func(q, k, v, causal=True)], [wanted])
    o = onchip.torch.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    same([o.transpose(1, 2)], [attention(q, k, v, causal=True, alignment="top_left")])


def test_autocast(attention):
    q, k, v = (to_torch(x) for x in inputs())
    with torch.autocast("cuda", torch.bfloat16):
        same([attention(q.float(), k.float(), v.float())], [attention(q, k, v).bfloat16()])


def test_many_threads_on_streams_of_their_own(attention):
    cases = []
    for index in range(8):
        dtype, dim = (torch.float16, torch.bfloat16)[index % 2], (64, 128)[index // 2 % 2]
        q = torch.randn(2, 300 + index, 4, dim, device="cuda").to(dtype)
        cases.append((q, attention(q, q, q, causal=index % 3 == 0, return_lse=True)))
    torch.cuda.synchronize()
    failures = []

    def work(index):
        try:
            q, wanted = cases[index]
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    got = attention(q, q, q, causal=index % 3 == 0, return_lse=True)
                torch.cuda.current_stream().synchronize()
            same(got, wanted)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_no_memory_is_kept(attention):
    q, k, v = (to_torch(x) for x in inputs())
    attention(q, k, v, return_lse=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        attention(q, k, v, return_lse=True)
        onchip.ops.attention_forward(q, k, v)
    assert torch.cuda.memory_allocated() == before


# ---- other libraries


@pytest.mark.filterwarnings("default")  # of CuPy's own
@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16], ids=dtype_name)
def test_cupy(dtype):
    cupy = pytest.importorskip("cupy")
    try:
        cupy.empty(1, dtype)
    except TypeError as error:
        pytest.skip(f"this CuPy has no {dtype_name(dtype)}: {error}")
    arrays = inputs(dtype)
    tensors = [to_torch(x) for x in arrays]
    wanted = [to_numpy(x) for x in onchip.ops.attention_forward(*tensors, causal=True)]
    q, k, v = (cupy.asarray(x.view("u2")).view(dtype) for x in arrays)
    stream = cupy.cuda.Stream(non_blocking=True)
    for current in (cupy.cuda.Stream.null, stream):
        with current:
            late = [x.copy() for x in (q, k, v)]
            o, lse = onchip.ops.attention_forward(*late, causal=True)
            assert isinstance(o, cupy.ndarray) and o.dtype == dtype and lse.dtype == np.float32
            got = [cupy.asnumpy(o.view("u2")).view(dtype), cupy.asnumpy(lse)]
        assert_same_bits(got, wanted)


@pytest.mark.filterwarnings("default")  # of JAX's own
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_jax(dtype, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX does not see the GPU")
    arrays = inputs(np.dtype(getattr(jax.numpy, dtype)), shape=(1, LONG, 8, 64))
    tensors = [to_torch(x) for x in arrays]
    wanted = [to_numpy(x) for x in onchip.ops.attention_forward(*tensors, causal=True)]
    doubled = [jax.device_put(x) for x in arrays]
    for _ in range(5):
        q, k, v = (x * 2 / 2 for x in doubled)  # pending work of JAX's own
        o, lse = onchip.ops.attention_forward(q, k, v, causal=True)
        assert isinstance(o, jax.Array) and o.dtype == dtype and o.devices() == q.devices()
        later = o + 0  # read by JAX's stream
        del q, k, v
        assert_same_bits([np.asarray(later), np.asarray(lse)], wanted)
        compare.assert_bitwise("o", np.asarray(o), wanted[0])


def test_numpy_lengths_beside_gpu_tensors():
    q, k, v = (to_torch(x.reshape(400, 4, 64)) for x in inputs())
    cu = np.array([0, 30, 400], np.int32)
    same(
        onchip.ops.attention_forward(q, k, v, cu_seqlens_q=cu),
        onchip.ops.attention_forward(q, k, v, cu_seqlens_q=torch.tensor(cu, device="cuda")),
    )
