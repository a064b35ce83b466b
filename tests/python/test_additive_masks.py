"""Bias and boolean masks: broadcasting, finite stand-ins for -inf, large ramps, dbias.

Public reports: pytorch #109517, #110213, #153799, jax #28974, #30593, #27184, #32242,
flash-attention #17.
"""

import ml_dtypes
import numpy as np
import pytest
from harness import (
    BACKWARD_BACKENDS,
    BFLOAT16,
    DTYPES,
    assert_same_bits,
    backward,
    check,
    check_backward,
    check_forward,
    draw,
    draw_qkv,
    dtype_name,
    forward,
)

import onchip
from onchip.oracle import compare

LOWEST = np.finfo(np.float32).min


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=dtype_name)
def test_the_most_negative_finite_number_excludes_columns(backend, dtype):
    q, k, v = draw_qkv(np.random.default_rng(1), dtype, 1, 441, heads=(1, 1), dims=(64, 64))
    bias = np.zeros((1, 1, 441, 441), np.float32)
    bias[..., :128] = LOWEST
    o, lse, _ = check(backend, q, k, v, bias=bias)
    without_o, without_lse = forward(backend, q, k[:, 128:], v[:, 128:])
    compare.assert_same_value("o", o, without_o)
    compare.assert_same_value("lse", lse, without_lse)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=dtype_name)
def test_the_most_negative_finite_number_in_a_whole_row_averages_it(backend, dtype):
    """score + min rounds to min: all keys weigh the same. It is not -inf: the row is not empty."""
    q, k, v = draw_qkv(np.random.default_rng(2), dtype, 1, 441, heads=(1, 1), dims=(64, 64))
    bias = np.zeros((1, 1, 441, 441), np.float32)
    bias[..., 17, :] = LOWEST
    o, lse = check_forward(backend, q, k, v, bias=bias)
    compare.assert_same_value("o", o[:, 17], v.astype(np.float64).mean(1).astype(dtype))
    assert np.isfinite(lse).all()
    if backend in BACKWARD_BACKENDS:
        # log(441) is lost in an fp32 lse of -3e38: the row's gradient has no digits, but no NaN.
        gradients = backward(backend, o, q, k, v, o, lse, bias=bias)
        assert all(np.isfinite(np.asarray(x, np.float64)).all() for x in gradients[:4])


@pytest.mark.parametrize("bias_dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_the_least_number_of_any_bias_and_minus_infinity(backend, dtype, bias_dtype):
    """In columns, in whole rows, and rows of both."""
    rng = np.random.default_rng(12)
    q, k, v = draw_qkv(rng, dtype, 1, 40, 150, heads=(2, 1))
    lowest = ml_dtypes.finfo(bias_dtype).min
    bias = draw(rng, (1, 2, 40, 150), bias_dtype)
    bias[..., 30:40], bias[..., 40:50] = lowest, -np.inf
    bias[..., 17, :], bias[..., 18, :] = lowest, -np.inf
    bias[..., 19, :70], bias[..., 19, 70:] = lowest, -np.inf
    o, lse = check_forward(backend, q, k, v, bias=bias)
    assert not np.asarray(o[:, 18], np.float64).any() and np.isneginf(lse[..., 18]).all()
    if backend not in BACKWARD_BACKENDS:
        return
    d_o = draw(rng, o.shape, dtype)
    gradients = backward(backend, d_o, q, k, v, o, lse, bias=bias)
    assert all(np.isfinite(np.asarray(x, np.float64)).all() for x in gradients[:4])
    # The lse of rows 17 and 19 may have no digits left: the rest has all of its own.
    d_o[:, [17, 19]] = 0
    check_backward(backend, d_o, q, k, v, o, lse, bias=bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("value", [-1e4, -3e4, -6e4], ids=str)
def test_rows_whose_logits_are_all_hugely_negative(backend, value, dtype):
    """Their softmax is the softmax of what is left of them, in whatever precision the sum keeps."""
    q, k, v = draw_qkv(np.random.default_rng(2), dtype, 1, 33, 70)
    bias = np.full((1, 1, 1, 1), value, np.float32)
    check(backend, q, k, v, bias=bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_minus_infinity_excludes_as_false_does(backend, dtype):
    rng = np.random.default_rng(3)
    q, k, v = draw_qkv(rng, dtype, 2, 37, 45)
    mask = rng.random((2, 1, 37, 45)) < 0.6
    mask[0, 0, 4] = False
    bias = np.where(mask, 0, -np.inf).astype(np.float32)
    o, lse, _ = check(backend, q, k, v, mask=mask)
    biased_o, biased_lse, _ = check(backend, q, k, v, bias=bias)
    compare.assert_same_value("o", biased_o, o)
    compare.assert_same_value("lse", biased_lse, lse)


@pytest.mark.parametrize(
    "axes", [(1, 2), (0, 1), (0,), (1,), (2,), (3,), (0, 1, 2), (0, 1, 2, 3)], ids=str
)
@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_broadcast_equals_expanded(backend, kind, axes):
    rng = np.random.default_rng(4)
    q, k, v = draw_qkv(rng, np.float32, 3, 35, 50, heads=(4, 2))
    full = (3, 4, 35, 50)
    shape = tuple(1 if axis in axes else size for axis, size in enumerate(full))
    small = rng.random(shape) < 0.7 if kind == "mask" else draw(rng, shape, np.float32)
    if axes == (0, 1, 2, 3):
        small[...] = 1
    o, lse, gradients = check(backend, q, k, v, **{kind: small})
    stretched = np.broadcast_to(small, full)  # strides 0
    assert_same_bits(forward(backend, q, k, v, **{kind: stretched}), (o, lse))
    assert_same_bits(forward(backend, q, k, v, **{kind: stretched.copy()}), (o, lse))
    if gradients is not None:
        d_o = draw(np.random.default_rng(o.size), o.shape, o.dtype)
        expanded = backward(backend, d_o, q, k, v, o, lse, **{kind: stretched})
        assert_same_bits(expanded[:3], gradients[:3])


@pytest.mark.parametrize("axes", range(16), ids="{:04b}".format)
def test_the_gradient_of_every_broadcast_with_any_number_of_threads(grad_backend, axes):
    rng = np.random.default_rng(axes)
    q, k, v = draw_qkv(rng, np.float32, 2, 100, 390, heads=(4, 2), dims=(8, 8))
    d_o = draw(rng, q.shape, np.float32)
    shape = [1 if axes >> axis & 1 else size for axis, size in enumerate((2, 4, 100, 390))]
    bias = draw(rng, shape, np.float32)
    before = onchip.get_num_threads()
    try:
        onchip.set_num_threads(1)
        o, lse, wanted = check(grad_backend, q, k, v, d_o=d_o, bias=bias)
        onchip.set_num_threads(2)
        assert_same_bits(backward(grad_backend, d_o, q, k, v, o, lse, bias=bias), wanted)
    finally:
        onchip.set_num_threads(before)


@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_broadcast_axes_are_not_copied_to_full_size(kind):
    """Neither in Python nor in the library: workspace does not grow with what a view repeats."""
    small = np.ones((1, 1, 1, 3000), bool if kind == "mask" else np.float32)
    q = np.ones((4, 3000, 2, 8), np.float32)
    stretched = np.broadcast_to(small, (4, 2, 3000, 3000))
    plans = [
        onchip.explain("attention_forward", q, q, q, **{kind: x}, backend="cpu")
        for x in (small, stretched)
    ]
    assert plans[0] == plans[1]
    assert "copied" not in plans[1]


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=dtype_name)
def test_gradient_of_a_bias_shared_by_the_batch(grad_backend, dtype):
    rng = np.random.default_rng(5)
    q, k, v = draw_qkv(rng, dtype, 8, 128, heads=(4, 4), dims=(32, 32))
    bias = draw(rng, (1, 4, 128, 128), np.float32)
    _, _, gradients = check(grad_backend, q, k, v, bias=bias)
    assert gradients.dbias.dtype == np.float32 and gradients.dbias.any()


@pytest.mark.parametrize("bias_dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_a_bias_may_have_any_float_dtype(backend, dtype, bias_dtype):
    rng = np.random.default_rng(6)
    q, k, v = draw_qkv(rng, dtype, 2, 20, 21)
    check(backend, q, k, v, bias=draw(rng, (2, 1, 20, 21), bias_dtype), softcap=3.0)


@pytest.mark.parametrize("seqlen", [256, 257, 1025])
def test_a_large_ramp(backend, seqlen):
    q, k, v = draw_qkv(np.random.default_rng(7), BFLOAT16, 1, seqlen, heads=(1, 1), dims=(64, 64))
    i, j = np.arange(seqlen)[:, None], np.arange(seqlen)[None, :]
    bias = (i - j).astype(BFLOAT16)[None, None]
    _, _, gradients = check(backend, q, k, v, bias=bias, causal=True)
    if gradients is not None:
        assert all(np.isfinite(np.asarray(x, np.float64)).all() for x in gradients[:4])


def test_a_packed_bias_is_indexed_by_position(backend):
    rng = np.random.default_rng(8)
    q, k, v = (draw(rng, (30, 2, 8), np.float32) for _ in range(3))
    packed = dict(cu_seqlens_q=np.array([0, 4, 4, 21, 30], np.int32))
    for shape in [(4, 2, 17, 17), (1, 1, 17, 17), (4, 1, 1, 17), (1, 2, 17, 1), (4, 1, 40, 19)]:
        check(backend, q, k, v, bias=draw(rng, shape, np.float32), **packed)
        check(backend, q, k, v, mask=rng.random(shape) < 0.7, **packed)


def test_segments(backend):
    rng = np.random.default_rng(9)
    q, k, v = draw_qkv(rng, np.float32, 2, 40, 50)
    ids = np.sort(rng.integers(-2, 3, (2, 50), dtype=np.int32), axis=1)
    check(backend, q, k, v, q_segment_ids=ids[:, 10:], kv_segment_ids=ids)
    check(backend, q, k, v, q_segment_ids=ids[:, 10:], kv_segment_ids=ids, causal=True)
    scattered = rng.integers(0, 3, (2, 50), dtype=np.int32)
    check(backend, q, k, v, q_segment_ids=scattered[:, :40], kv_segment_ids=scattered)


def test_a_segment_is_a_sequence_of_its_own(backend):
    q, k, v = draw_qkv(np.random.default_rng(10), np.float32, 1, 30)
    cu = np.array([0, 11, 12, 30], np.int32)
    ids = np.repeat(np.arange(3, dtype=np.int32), np.diff(cu))[None]
    o, lse = check_forward(backend, q, k, v, q_segment_ids=ids, kv_segment_ids=ids, causal=True)
    packed_o, packed_lse = check_forward(backend, q[0], k[0], v[0], cu_seqlens_q=cu, causal=True)
    compare.assert_same_value("o", o[0], packed_o)
    compare.assert_same_value("lse", lse[0], packed_lse)
