"""Arrays into the library and results out of it: the libraries, every layout, nothing
leaked."""

import ctypes
import gc
import os
import resource
import subprocess
import sys
import threading
import time
import tracemalloc
from array import array

import ml_dtypes
import numpy as np
import pytest
from producers import (
    Producer,
    StandardArray,
    contents,
    qkv,
    read,
)

import onchip
from onchip import _native

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]


# ---- NumPy


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_numpy_in_numpy_out(dtype):
    q, k, v = qkv(dtype)
    o, lse = onchip.ops.attention_forward(q, k, v)
    wanted_lse = np.float64 if dtype is np.float64 else np.float32
    assert type(o) is np.ndarray and o.dtype == dtype and o.shape == (2, 5, 4, 6)
    assert type(lse) is np.ndarray and lse.dtype == wanted_lse and lse.shape == (2, 4, 5)
    gradients = onchip.ops.attention_backward(o, q, k, v, o, lse)
    for gradient, value in zip(gradients[:3], (q, k, v), strict=True):
        assert type(gradient) is np.ndarray
        assert gradient.dtype == dtype and gradient.shape == value.shape
    assert gradients.dbias is None and gradients.dsink is None


def test_gradients_of_what_was_given():
    q, k, v = qkv()
    bias = np.zeros((1, 4, 1, 7), np.float16)
    sink = np.zeros(4, np.float64)
    o, lse = onchip.ops.attention_forward(q, k, v, bias=bias, sink=sink)
    gradients = onchip.ops.attention_backward(o, q, k, v, o, lse, bias=bias, sink=sink)
    assert gradients._fields == ("dq", "dk", "dv", "dbias", "dsink")
    assert gradients.dbias.shape == bias.shape and gradients.dbias.dtype == np.float16
    assert gradients.dsink.shape == sink.shape and gradients.dsink.dtype == np.float64


def test_bfloat16_is_taken_by_its_bytes():
    q, k, v = qkv(ml_dtypes.bfloat16)
    o, lse = onchip.ops.attention_forward(q, k, v, backend="reference")
    exact, exact_lse = onchip.ops.attention_forward(
        *(x.astype(np.float64) for x in (q, k, v)), backend="reference"
    )
    # The reference computes in double precision and rounds once.
    np.testing.assert_array_equal(o.view(np.uint16), exact.astype(o.dtype).view(np.uint16))
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6)


def test_bias_of_another_dtype():
    q, k, v = qkv(np.float32)
    bias = np.zeros((1, 1, 5, 7), ml_dtypes.bfloat16)
    o, lse = onchip.ops.attention_forward(q, k, v, bias=bias)
    gradients = onchip.ops.attention_backward(o, q, k, v, o, lse, bias=bias)
    assert gradients.dbias.dtype == ml_dtypes.bfloat16


def test_read_only_inputs():
    q, k, v = qkv()
    wanted = onchip.ops.attention_forward(q, k, v)
    before = [x.copy() for x in (q, k, v)]
    for x in (q, k, v):
        x.flags.writeable = False
    got = onchip.ops.attention_forward(q, k, v)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip((q, k, v), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_subclass_gives_plain_arrays():
    class Special(np.ndarray):
        pass

    q, k, v = qkv()
    o, lse = onchip.ops.attention_forward(q.view(Special), k, v)
    assert type(o) is np.ndarray and type(lse) is np.ndarray


def test_masked_array_is_refused():
    q, k, v = qkv()
    with pytest.raises(onchip.InvalidArgument, match=r"attention_forward: k: got a MaskedArray"):
        onchip.ops.attention_forward(q, np.ma.masked_array(k), v)


@pytest.mark.parametrize("shape", [(0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 0, 8)])
def test_empty_arrays(shape):
    x = np.zeros(shape, np.float32)
    o, lse = onchip.ops.attention_forward(x, x, x)
    assert o.shape == shape and lse.shape == (shape[0], shape[2], shape[1])


# ---- layouts


def misaligned(x):
    memory = np.zeros(x.nbytes + 1, np.uint8)
    view = memory[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


def field_of_records(x):
    records = np.zeros(x.shape, np.dtype([("pad", "u1"), ("x", x.dtype)]))
    records["x"] = x
    return records["x"]


def innermost_apart(x):
    wide = np.zeros((*x.shape[:-1], 3 * x.shape[-1]), x.dtype)
    wide[..., ::3] = x
    return wide[..., ::3]


def innermost_reversed(x):
    return np.ascontiguousarray(x[..., ::-1])[..., ::-1]


def heads_first(x):
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)


def rows_reversed(x):
    return np.ascontiguousarray(x[:, ::-1])[:, ::-1]


# layout -> what explain says of q [2, 5, 4, 8] in float32; None: taken as it is
LAYOUTS = {
    heads_first: None,
    rows_reversed: None,
    innermost_apart: "q (innermost stride 3)",
    innermost_reversed: "q (innermost stride -1)",
    misaligned: "q (address not a multiple of 4)",
    field_of_records: "q (stride of 5 bytes)",
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_layouts(layout):
    q, k, v = qkv()
    wanted = onchip.ops.attention_forward(q, k, v)
    for got in (
        onchip.ops.attention_forward(layout(q), k, v),
        onchip.ops.attention_forward(layout(q), layout(k), layout(v)),
    ):
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(a, b)
    text = onchip.explain("attention_forward", layout(q), k, v)
    copied = [line for line in text.splitlines() if line.startswith("copied: ")]
    assert copied == ([] if LAYOUTS[layout] is None else [f"copied: {LAYOUTS[layout]}"])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize(
    "dtype", [np.float64, np.float32, np.float16, np.int32, np.int64, np.bool_]
)
def test_copies_hold_the_values(layout, dtype):
    x = np.random.default_rng(1).integers(0, 2, (3, 4, 2, 5)).astype(dtype)
    tensor = read(layout(x)).contiguous()
    assert tensor.layout_problem is None
    assert tensor.address % tensor.byte_strides[-1] == 0
    np.testing.assert_array_equal(contents(tensor, dtype), x)


def test_copy_of_a_broadcast_array_stays_small():
    x = np.broadcast_to(np.arange(3, dtype=np.float32)[:, None, None], (3, 1 << 20, 1 << 20))
    tensor = read(x).contiguous()
    assert tensor.shape == x.shape
    assert tensor.byte_strides == (4 << 20, 0, 4)
    got = np.ndarray(
        (3, 2, 1 << 20),
        np.float32,
        (ctypes.c_char * (12 << 20)).from_address(tensor.address),
        0,
        (4 << 20, 0, 4),
    )
    np.testing.assert_array_equal(got, x[:, :2])


def test_all_strides_zero_gradient():
    q, k, v = qkv()
    o, lse = onchip.ops.attention_forward(q, k, v)
    one = np.broadcast_to(np.float32(1), o.shape)
    got = onchip.ops.attention_backward(one, q, k, v, o, lse)
    wanted = onchip.ops.attention_backward(np.ones_like(o), q, k, v, o, lse)
    for a, b in zip(got[:3], wanted[:3], strict=True):
        np.testing.assert_array_equal(a, b)


def test_explain_copies_nothing():
    x = np.broadcast_to(np.float32(1), (1, 1 << 20, 1 << 10, 256))[..., ::-1]
    assert x.strides[-1] == 0
    tracemalloc.start()
    text = onchip.explain("attention_forward", x, x, x)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "copied: q (innermost stride 0)\ncopied: k (innermost stride 0)\n" in text
    assert peak < 1 << 20


# ---- integers given as sequences


def test_sequences_of_integers():
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in qkv())
    lengths = np.array([0, 3, 10], np.int32), np.array([0, 8, 14], np.int64)
    wanted = onchip.ops.attention_forward(
        q, k, v, cu_seqlens_q=lengths[0], cu_seqlens_kv=lengths[1]
    )
    for kind in (list, tuple, lambda x: array("q", x), lambda x: np.stack([x, x], 1)[:, 0]):
        got = onchip.ops.attention_forward(
            q,
            k,
            v,
            cu_seqlens_q=kind(lengths[0].tolist()),
            cu_seqlens_kv=kind(lengths[1].tolist()),
        )
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(a, b)


def test_dropout_rng_as_a_pair():
    q, k, v = qkv()
    rng = np.array([-(2**63), 2**32 - 1], np.int64)
    wanted = onchip.ops.attention_forward(
        q, k, v, dropout_p=0.5, dropout_rng=rng, backend="reference"
    )
    got = onchip.ops.attention_forward(
        q, k, v, dropout_p=0.5, dropout_rng=(-(2**63), 2**32 - 1), backend="reference"
    )
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("bad", [[0, 1.5], [0, "5"], [0, 2**63], ["x"], [[0], [5]]])
def test_sequences_of_something_else(bad):
    q, k, v = qkv()
    with pytest.raises(onchip.InvalidArgument, match=r"^attention_forward: seqlens_q: got a list "):
        onchip.ops.attention_forward(q, k, v, seqlens_q=bad)


# ---- nothing is leaked


def refused_calls(q, k, v):
    """Calls that fail at each step: a cast, an option, the contract, the choice of a backend."""
    yield lambda: onchip.ops.attention_forward(q, k, [1.0])
    yield lambda: onchip.ops.attention_forward(q, k, v, causal="yes")
    yield lambda: onchip.ops.attention_forward(q, k, v, backend=3)
    yield lambda: onchip.ops.attention_forward(q, k, v, mask=k)
    yield lambda: onchip.ops.attention_forward(q, k, v[:, :-1])
    yield lambda: onchip.ops.attention_forward(q, k, v, seqlens_q=[99, 99])
    yield lambda: onchip.ops.attention_backward(q, q, k, v, q, q)
    yield lambda: onchip.ops.merge(q, q, q, q)


def test_references_come_back():
    q, k, v = qkv()
    apart = innermost_apart(k)

    def rounds(count):
        for _ in range(count):
            o, lse = onchip.ops.attention_forward(q, apart, v, backend="reference")
            onchip.ops.attention_backward(o, q, k, v, o, lse)
            onchip.ops.merge(o, lse, o, lse)
            onchip.explain("attention_forward", q, apart, v)
            for call in refused_calls(q, k, v):
                with pytest.raises(onchip.InvalidArgument):
                    call()

    # A heap type is referred to by each of its instances.
    watched = (q, k, v, apart, _native.Tensor, _native.Call, onchip.InvalidArgument)
    rounds(3)
    references = [sys.getrefcount(x) for x in watched]
    rounds(3)
    assert [sys.getrefcount(x) for x in watched] == references

    tracemalloc.start()
    rounds(150)  # until the caches of small blocks are full
    gc.collect()
    tracked = len(gc.get_objects())
    before, _ = tracemalloc.get_traced_memory()
    rounds(300)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    grown = len(gc.get_objects()) - tracked
    tracemalloc.stop()
    assert grown < 100  # tuples, dictionaries, exceptions
    # The smallest result, lse, has 160 bytes.
    assert after - before < 300 * 80


def test_memory_of_the_library_comes_back():
    q, k, v = qkv(np.float64)

    def rounds(count):
        for _ in range(count):
            onchip.ops.attention_forward(q, innermost_apart(k), v)
            with pytest.raises(onchip.InvalidArgument):
                onchip.ops.attention_forward(q, k, v, causal="yes")

    rounds(200)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rounds(3000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 4096  # KiB


# ---- threads


def test_other_threads_run_during_a_call():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 2000, 4, 64))
    done = threading.Event()

    def work():
        onchip.ops.attention_forward(x, x, x, backend="reference")
        done.set()

    began = time.perf_counter()
    thread = threading.Thread(target=work)
    thread.start()
    ticks = 0
    while not done.is_set():
        time.sleep(0.001)
        ticks += 1
    thread.join()
    elapsed = time.perf_counter() - began
    # With the lock held throughout, the loop would run once or twice.
    assert elapsed > 0.05, "too short a call to tell"
    assert ticks > 10


def test_calls_from_many_threads():
    q, k, v = qkv()
    wanted = onchip.ops.attention_forward(q, k, v)
    wrong = []

    def work(seed):
        for _ in range(50):
            o, lse = onchip.ops.attention_forward(q, k, v)
            if not (np.array_equal(o, wanted[0]) and np.array_equal(lse, wanted[1])):
                wrong.append(seed)
            try:
                onchip.ops.attention_forward(q, k, v, softcap=-1.0 - seed)
            except onchip.InvalidArgument as error:
                # The message is the calling thread's own.
                if f"got {-1 - seed}" not in str(error):
                    wrong.append(str(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_interpreter_that_ends_during_a_call_prints_nothing():
    code = (
        "import threading, time\n"
        "import numpy as np, onchip\n"
        "x = np.zeros((1, 20000, 4, 64))\n"
        "call = lambda: onchip.ops.attention_forward(x, x, x, backend='reference')\n"
        "threading.Thread(target=call, daemon=True).start()\n"
        "time.sleep(0.3)\n"
        "print('ends')\n"
    )
    # One thread: the library has no others that the end of the process would wait for.
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"ONCHIP_NUM_THREADS": "1"},
    )
    assert (done.stdout, done.stderr) == ("ends\n", "")


# ---- other libraries


def test_library_of_the_array_api_standard():
    q, k, v = qkv()
    wanted = onchip.ops.attention_forward(q, k, v)
    got = onchip.ops.attention_forward(*(StandardArray(x) for x in (q, k, v)))
    for a, b in zip(got, wanted, strict=True):
        assert type(a) is StandardArray
        np.testing.assert_array_equal(a.array, b)


def test_first_array_decides_the_library():
    q, k, v = qkv()
    o, lse = onchip.ops.attention_forward(StandardArray(q), k, Producer(v))
    assert type(o) is StandardArray and type(lse) is StandardArray
    o, lse = onchip.ops.attention_forward(q, StandardArray(k), Producer(v))
    assert type(o) is np.ndarray and type(lse) is np.ndarray
    gradients = onchip.ops.attention_backward(StandardArray(o), q, k, v, o, lse)
    assert type(gradients.dq) is np.ndarray


def test_array_without_a_library():
    q, k, v = qkv()
    for x in (Producer(q), memoryview(q), [1.0], None):
        with pytest.raises(
            onchip.InvalidArgument, match=r"^attention_forward: q: got .*, wanted an array whose"
        ):
            onchip.ops.attention_forward(x, k, v)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_torch(dtype):
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    numpy_kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    q, k, v = (torch.from_numpy(x.astype(np.float64)).to(kind) for x in qkv(numpy_kind))
    o, lse = onchip.ops.attention_forward(q, k.transpose(1, 2).contiguous().transpose(1, 2), v)
    assert type(o) is torch.Tensor and o.dtype == kind and o.shape == (2, 5, 4, 6)
    assert lse.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    wanted, _ = onchip.ops.attention_forward(*qkv(numpy_kind))
    np.testing.assert_array_equal(o.double().numpy(), wanted.astype(np.float64))
    gradients = onchip.ops.attention_backward(o, q, k, v, o, lse)
    assert gradients.dv.dtype == kind and gradients.dv.shape == v.shape
    text = onchip.explain("attention_forward", q.mT.contiguous().mT, k, v)
    assert "copied: q (innermost stride 4)" in text


def test_torch_refusals():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in qkv())
    with pytest.raises(onchip.InvalidArgument, match=r"k: got a tensor that requires grad"):
        onchip.ops.attention_forward(q, k.clone().requires_grad_(), v)
    with pytest.raises(onchip.InvalidArgument, match=r"k: got Tensor that does not export"):
        onchip.ops.attention_forward(q, k.to_sparse(), v)
    with pytest.raises(onchip.InvalidArgument, match=r"v: .*float64"):
        onchip.ops.attention_forward(q, k, v.double())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax(dtype):
    jax = pytest.importorskip("jax")
    q, k, v = (jax.numpy.asarray(x, dtype=dtype) for x in qkv())
    o, lse = onchip.ops.attention_forward(q, k, v)
    assert isinstance(o, jax.Array) and o.dtype == dtype and isinstance(lse, jax.Array)
    numpy_kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    wanted, _ = onchip.ops.attention_forward(*qkv(numpy_kind))
    np.testing.assert_array_equal(np.asarray(o), wanted)
    with pytest.raises(onchip.InvalidArgument, match="q: got DynamicJaxprTracer"):
        jax.jit(lambda x: onchip.ops.attention_forward(x, x, x)[0])(q)


def test_lengths_that_change_during_the_call():
    """A call keeps the values that it has checked; if not, this one leaves its arrays."""
    script = """
import threading
import numpy, onchip

x = numpy.ones((1500, 1, 8), "float32")
cu_seqlens = numpy.array([0, 750, 1500])
stop = False

def change():
    while not stop:
        cu_seqlens[1] = 1 << 40
        cu_seqlens[1] = 750
        cu_seqlens[2] = -5
        cu_seqlens[2] = 1500

thread = threading.Thread(target=change)
thread.start()
try:
    for _ in range(300):
        try:
            onchip.ops.attention_forward(x, x, x, cu_seqlens_q=cu_seqlens, backend="cpu")
        except onchip.InvalidArgument:
            pass
finally:
    stop = True
    thread.join()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
