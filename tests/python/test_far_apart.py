"""Rows more than 2^31 elements apart, in memory that is reserved and hardly touched: an offset that
was ever a 32-bit number reads something else. Public reports: flash-linear-attention #1080, #769,
mamba #1015, pytorch #147585."""

import math
import mmap

import numpy as np
import pytest
from harness import BFLOAT16, DECODE_BACKENDS, assert_same_bits, backward, decode, forward
from linear_cases import Sizes, calls_with, draw, draw_state, parts_of, rows_of, step
from linear_cases import backward as linear_backward
from linear_cases import forward as linear_forward

import onchip
from onchip.oracle import compare

FAR = 2**31 + 64  # elements
NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which the module has no name for


def far_apart(x, axis):
    """A copy of x whose neighbours along `axis` lie FAR or more elements apart over all."""
    if x.shape[axis] < 2:
        return x
    apart = -(-FAR // (x.shape[axis] - 1))
    inner = np.ascontiguousarray(np.moveaxis(x, axis, 0))
    size = (apart * (x.shape[axis] - 1) + math.prod(inner.shape[1:])) * x.itemsize
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    strides = (apart * x.itemsize, *inner.strides[1:])
    view = np.moveaxis(np.ndarray(inner.shape, x.dtype, memory, 0, strides), 0, axis)
    view[...] = x
    return view


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_attention(backend, axis):
    rng = np.random.default_rng(1)
    q, k, v, d_o = (rng.standard_normal((2, 40, 2, 16)).astype(BFLOAT16) for _ in range(4))
    bias = rng.standard_normal((2, 2, 40, 40)).astype(BFLOAT16)
    mask = rng.random((2, 2, 40, 40)) < 0.8
    o, lse = forward(backend, q, k, v, bias=bias, mask=mask)
    wanted = backward(backend, d_o, q, k, v, o, lse, bias=bias, mask=mask)
    qkv = [far_apart(x, axis) for x in (q, k, v)]
    pairs = dict(bias=far_apart(bias, axis), mask=far_apart(mask, axis))
    assert_same_bits(forward(backend, *qkv, **pairs), (o, lse))
    got = backward(backend, far_apart(d_o, axis), *qkv, far_apart(o, axis), lse, **pairs)
    assert_same_bits(got[:4], wanted[:4])


@pytest.mark.parametrize("on", DECODE_BACKENDS)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("paged", [False, True])
def test_decode(on, axis, paged):
    rng = np.random.default_rng(2)
    caches = [rng.standard_normal((4, 16, 2, 8)).astype(np.float32) for _ in range(2)]
    q, k, v = (rng.standard_normal((2, 3, 2, 8)).astype(np.float32) for _ in range(3))
    where = dict(cache_slot=np.array([3, 1], np.int32))
    if paged:
        where = dict(page_table=np.array([[3, 0], [1, 2]], np.int32))
    call = dict(cache_seqlens=np.array([13, 5], np.int32), k_new=k, v_new=v, **where)
    far = [far_apart(x, axis) for x in caches]
    assert_same_bits(decode(on, q, *far, **call), decode(on, q, *caches, **call))
    for got, want in zip(far, caches, strict=True):
        compare.assert_bitwise("cache", got, want)


ENGINES = calls_with(op=("simple_gla", "mamba2", "gated_delta_rule", "kda", "rwkv7", "gsa"))


@ENGINES
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_linear(on, variant, axis):
    rng = np.random.default_rng(3)
    sizes = Sizes(batch=2, length=20, heads_k=2, heads_v=2, dk=8, dv=8)
    tensors = draw(rng, variant, sizes, BFLOAT16)
    d_o = rng.standard_normal((2, 20, 2, 8)).astype(BFLOAT16)
    o, _ = linear_forward(on, variant, tensors)
    wanted = linear_backward(on, variant, d_o, tensors)
    far = {
        name: far_apart(x, axis) if name in rows_of(variant, tensors) else x
        for name, x in tensors.items()
    }
    compare.assert_bitwise("o", linear_forward(on, variant, far)[0], o)
    got = linear_backward(on, variant, far_apart(d_o, axis), far)
    for name in tensors:
        compare.assert_bitwise(name, getattr(got, "d" + name), getattr(wanted, "d" + name))


@ENGINES
def test_state_pools(on, variant):
    rng = np.random.default_rng(4)
    sizes = Sizes(batch=2, heads_k=2, heads_v=2, dk=8, dv=8)
    one = draw(rng, variant, sizes, np.float32, lead=(2,), is_step=True)
    pool = parts_of(draw_state(rng, variant, sizes, 3, np.float32, variant.layout({})))
    far = tuple(far_apart(part, 0) for part in pool)
    indices = np.array([2, 1], np.int32)
    got, want = (
        step(on, variant, one, state=x if len(x) > 1 else x[0], state_indices=indices)
        for x in (far, pool)
    )
    compare.assert_bitwise("o", got, want)
    for part, other in zip(far, pool, strict=True):
        compare.assert_bitwise("pool", part, other)


@pytest.mark.parametrize("axis", [0, 1])
def test_convolution_and_norms(axis):
    rng = np.random.default_rng(5)
    x, d_y = (rng.standard_normal((2, 20, 8)).astype(np.float32) for _ in range(2))
    weight = rng.standard_normal((8, 4)).astype(np.float32)
    far, d_far = far_apart(x, axis), far_apart(d_y, axis)
    ops = onchip.ops
    for got, want in (
        (ops.causal_conv1d_forward(far, weight)[:1], ops.causal_conv1d_forward(x, weight)[:1]),
        (
            ops.causal_conv1d_backward(d_far, far, weight),
            ops.causal_conv1d_backward(d_y, x, weight),
        ),
        ([ops.l2norm_forward(far)], [ops.l2norm_forward(x)]),
        ([ops.l2norm_backward(d_far, far)], [ops.l2norm_backward(d_y, x)]),
        (
            ops.rms_norm_gated_backward(d_far, far, gate=far, activation="silu"),
            ops.rms_norm_gated_backward(d_y, x, gate=x, activation="silu"),
        ),
    ):
        for one, other in zip(got, want, strict=True):
            if other is not None:
                compare.assert_bitwise("result", one, other)
