"""What the operator tests share: the backends, how inputs are drawn, how a result is judged."""

import ml_dtypes
import numpy as np

import gpu
import onchip
from onchip.oracle import compare
from onchip.oracle.attention import Gradients

BFLOAT16 = ml_dtypes.bfloat16
DTYPES = [np.float64, np.float32, np.float16, BFLOAT16]

# Forced by name everywhere, so that no test quietly runs on another one.
BACKENDS = ["reference", "cpu"]
if gpu.problem() is None:
    BACKENDS.append(gpu.BACKEND)
MERGE_BACKENDS = ["reference", "cpu"]
DECODE_BACKENDS = ["reference", "cpu"]
# test_errors.py proves that the others refuse.
BACKWARD_BACKENDS = ["reference", "cpu"]


# Of the test that runs, if it has one; set by conftest.py.
current_backend = None


def on_gpu():
    return current_backend == gpu.BACKEND


def dtype_name(dtype):
    return np.dtype(dtype).name


def draw(rng, shape, dtype, size=1.0):
    """Normal numbers of standard deviation `size`, rounded to the dtype."""
    if on_gpu():
        dtype = gpu.DTYPES.get(np.dtype(dtype), dtype)
    return (size * rng.standard_normal(shape)).astype(dtype)


def draw_qkv(
    rng, dtype, batch=2, seqlen_q=9, seqlen_kv=None, heads=(2, 2), dims=(16, 16), size=1.0
):
    """q, k, v of a dense batch; heads: (query, key and value), dims: (of q and k, of v)."""
    seqlen_kv = seqlen_q if seqlen_kv is None else seqlen_kv
    q = draw(rng, (batch, seqlen_q, heads[0], dims[0]), dtype, size)
    k = draw(rng, (batch, seqlen_kv, heads[1], dims[0]), dtype, size)
    v = draw(rng, (batch, seqlen_kv, heads[1], dims[1]), dtype, size)
    return q, k, v


def forward(backend, q, k, v, **options):
    if backend == gpu.BACKEND:
        return gpu.forward(q, k, v, **options)
    return onchip.ops.attention_forward(q, k, v, backend=backend, **options)


def backward(backend, d_o, q, k, v, o, lse, **options):
    return onchip.ops.attention_backward(d_o, q, k, v, o, lse, backend=backend, **options)


def check_forward(backend, q, k, v, **options):
    """Run, judge, return (o, lse)."""
    o, lse = forward(backend, q, k, v, **options)
    compare.judge_forward((o, lse), q, k, v, **oracle_options(options))
    return o, lse


def check_backward(backend, d_o, q, k, v, o, lse, *, d_lse=None, **options):
    """Run, judge, return the gradients."""
    gradients = backward(backend, d_o, q, k, v, o, lse, d_lse=d_lse, **options)
    compare.judge_backward(gradients, d_o, q, k, v, d_lse=d_lse, **oracle_options(options))
    return gradients


def check(backend, q, k, v, *, d_o=None, d_lse=None, **options):
    """Forward, and backward where the backend has one. Returns (o, lse, gradients or None)."""
    o, lse = check_forward(backend, q, k, v, **options)
    if backend not in BACKWARD_BACKENDS:
        return o, lse, None
    if d_o is None:
        d_o = draw(np.random.default_rng(o.size), o.shape, o.dtype)
    return o, lse, check_backward(backend, d_o, q, k, v, o, lse, d_lse=d_lse, **options)


def decode(backend, q, k_cache, v_cache, **arguments):
    return onchip.ops.attention_decode(q, k_cache, v_cache, backend=backend, **arguments)


def check_decode(backend, q, k_cache, v_cache, **arguments):
    """Run, judge o, lse and both caches, return (o, lse). The caches are as the call leaves them; a
    v_cache without v_new lies in k_cache."""
    before = k_cache.copy(), v_cache.copy()
    o, lse = decode(backend, q, k_cache, v_cache, **arguments)
    compare.judge_decode((o, lse), (k_cache, v_cache), q, *before, **oracle_options(arguments))
    return o, lse


def right_or_refused(call, *words):
    """Runs call(), which judges its result; a refusal must have all these words in its message."""
    try:
        call()
        return
    except (onchip.InvalidArgument, onchip.Unsupported) as refusal:
        message = str(refusal)
    assert all(word in message for word in words), message


def oracle_options(options):
    """Hints and switches change no result: the oracle does not know them."""
    hints = (
        "max_seqlen_q",
        "max_seqlen_kv",
        "precision",
        "deterministic",
        "batch_invariant",
        "check",
    )
    return {name: value for name, value in options.items() if name not in hints}


def assert_same_bits(results, wanted):
    """Two (o, lse) pairs, or two beginnings of (dq, dk, dv, dbias, dsink), bit for bit."""
    names = ("o", "lse") if len(results) == 2 else Gradients._fields
    for name, got, want in zip(names[: len(wanted)], results, wanted, strict=True):
        if want is None:
            assert got is None, name
        else:
            compare.assert_bitwise(name, got, want)


def poisoned(array, rng):
    """The same values inside a larger buffer of NaN (of garbage for integers)."""
    margins = [(int(rng.integers(1, 4)), int(rng.integers(1, 4))) for _ in array.shape]
    if on_gpu():
        margins[-1] = tuple(8 * m for m in margins[-1])  # the kernel wants 16-byte strides
    if array.dtype.kind in "iub":
        poison = array.dtype.type(-(2**30) if array.dtype.kind == "i" else 1)
    else:
        poison = array.dtype.type(np.nan)
    buffer = np.full([sum(m) + n for m, n in zip(margins, array.shape, strict=True)], poison)
    buffer = buffer.astype(array.dtype, copy=False)
    view = buffer[tuple(slice(m[0], m[0] + n) for m, n in zip(margins, array.shape, strict=True))]
    view[...] = array
    return view


def restrided(array, rng):
    """The same values under other strides: axes stored in another order, some of them backwards."""
    order = rng.permutation(array.ndim)
    stored = np.ascontiguousarray(array.transpose(order)).transpose(np.argsort(order))
    for axis in range(array.ndim):
        if rng.random() < 0.3:
            stored = np.flip(np.ascontiguousarray(np.flip(stored, axis)), axis)
    return stored
