"""lse is an output like any other, with a gradient. Public reports: flash-attention #1137, #404."""

import numpy as np
import pytest
from harness import (
    DTYPES,
    assert_same_bits,
    backward,
    check,
    check_backward,
    draw,
    draw_qkv,
    dtype_name,
    forward,
)

from onchip.oracle import compare


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("seqlen", [3, 200])
def test_gradient_through_both_outputs(grad_backend, seqlen, dtype):
    rng = np.random.default_rng(seqlen)
    q, k, v = draw_qkv(rng, dtype, 2, seqlen, heads=(4, 2))
    d_lse = draw(rng, (2, 4, seqlen), compare.lse_dtype(dtype))
    for options in [dict(), dict(causal=True), dict(softcap=2.0, window=(5, 5))]:
        check(grad_backend, q, k, v, d_lse=d_lse, **options)


def test_only_lse_flows_when_d_o_is_zero(grad_backend):
    rng = np.random.default_rng(1)
    q, k, v = draw_qkv(rng, np.float64, 1, 20)
    o, lse = forward(grad_backend, q, k, v)
    zero = np.zeros_like(o)
    d_lse = draw(rng, lse.shape, np.float64)
    gradients = check_backward(grad_backend, zero, q, k, v, o, lse, d_lse=d_lse)
    assert gradients.dq.any() and gradients.dk.any() and not gradients.dv.any()
    nothing = check_backward(grad_backend, zero, q, k, v, o, lse)
    assert not any(x.any() for x in nothing[:3])


def test_absent_d_lse_is_zero(grad_backend):
    rng = np.random.default_rng(2)
    q, k, v = draw_qkv(rng, np.float32, 2, 17)
    d_o = draw(rng, q.shape, np.float32)
    o, lse = forward(grad_backend, q, k, v)
    absent = backward(grad_backend, d_o, q, k, v, o, lse)
    assert_same_bits(backward(grad_backend, d_o, q, k, v, o, lse, d_lse=np.zeros_like(lse)), absent)


def test_lse_is_taken_before_dropout_and_counts_the_sink(backend):
    q, k, v = draw_qkv(np.random.default_rng(3), np.float64, 1, 12)
    _, lse = forward(backend, q, k, v)
    sink = np.array([0.25, -3.0])
    _, with_sink = forward(backend, q, k, v, sink=sink)
    compare.assert_same_value("lse", with_sink, np.logaddexp(lse, sink[:, None]))
    dropped = dict(dropout_p=0.5, dropout_rng=np.array([1, 2], np.int64))
    compare.assert_same_value("lse", forward(backend, q, k, v, **dropped)[1], lse)


def test_lse_of_keys_without_direction_counts_them(backend):
    q, k, v = draw_qkv(np.random.default_rng(4), np.float32, 1, 9, 1000)
    _, lse = forward(backend, 0 * q, k, v)
    compare.assert_same_value("lse", lse, np.full(lse.shape, np.log(1000)))


def test_packed_layout_is_heads_first(backend):
    rng = np.random.default_rng(5)
    q, k, v = (draw(rng, (2 * 11, 3, 8), np.float32) for _ in range(3))
    cu = np.array([0, 11, 22], np.int32)
    o, lse = forward(backend, q, k, v, cu_seqlens_q=cu)
    dense_o, dense_lse = forward(backend, *(x.reshape(2, 11, 3, 8) for x in (q, k, v)))
    compare.assert_same_value("o", o, dense_o.reshape(22, 3, 8))
    compare.assert_same_value("lse", lse, dense_lse.transpose(1, 0, 2).reshape(3, 22))
