"""A learnable sink: one more logit of the softmax, without a value.

Public reports: flash-attention #1973, #2102, torchtitan #2211.
"""

import numpy as np
import pytest
from harness import DTYPES, check, draw, draw_qkv, dtype_name, forward

from onchip.oracle import compare


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("value", [-5.0, 0.5, 100.0])
def test_values_with_an_empty_row_and_a_window(backend, value, dtype):
    q, k, v = draw_qkv(np.random.default_rng(1), dtype, 2, 40, 33, heads=(4, 2), size=2)
    sink = (value + np.array([0, 0.5, -0.25, 0.125])).astype(np.float32)
    o, lse, gradients = check(backend, q, k, v, sink=sink, window=(9, 0))
    np.testing.assert_array_equal(lse[:, :, 0], np.broadcast_to(sink.astype(lse.dtype), (2, 4)))
    assert np.isfinite(o.astype(np.float64)).all()
    if gradients is not None:
        assert np.isfinite(gradients.dsink).all()


@pytest.mark.parametrize("sink_dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_a_sink_may_have_any_float_dtype(backend, dtype, sink_dtype):
    rng = np.random.default_rng(2)
    q, k, v = draw_qkv(rng, dtype, 1, 21)
    check(backend, q, k, v, sink=draw(rng, (2,), sink_dtype), causal=True)


def test_a_sink_of_minus_infinity_is_none(backend):
    q, k, v = draw_qkv(np.random.default_rng(3), np.float32, 1, 7, 5)
    o, lse, gradients = check(backend, q, k, v, sink=np.full(2, -np.inf, np.float32), causal=True)
    without_o, without_lse = forward(backend, q, k, v, causal=True)
    compare.assert_same_value("o", o, without_o)
    compare.assert_same_value("lse", lse, without_lse)
    assert np.isneginf(lse[:, :, :2]).all()
    if gradients is not None:
        assert not gradients.dsink.any()


def test_a_sink_renormalises(backend):
    """o = o_without * sigmoid(lse_without - sink)."""
    q, k, v = draw_qkv(np.random.default_rng(4), np.float64, 1, 30)
    sink = np.array([1.5, -0.5])
    o, _, _ = check(backend, q, k, v, sink=sink)
    without, lse = forward(backend, q, k, v)
    share = 1 / (1 + np.exp(sink[:, None] - lse))
    compare.assert_same_value("o", o, without * share.transpose(0, 2, 1)[..., None])


@pytest.mark.parametrize("sink", [88.8, 1e4, -1e4, 3e38])
def test_a_sink_far_above_or_below_every_logit(backend, sink):
    q, k, v = draw_qkv(np.random.default_rng(5), np.float32, 1, 16)
    check(backend, q, k, v, sink=np.full(2, sink, np.float32))


def test_packed(backend):
    rng = np.random.default_rng(6)
    q, k, v = (draw(rng, (23, 2, 8), np.float32) for _ in range(3))
    cu_q, cu_kv = np.array([0, 5, 5, 20, 23], np.int32), np.array([0, 0, 3, 10, 23], np.int32)
    sink = np.array([0.5, -1], np.float32)
    d_lse = draw(rng, (2, 23), np.float32)
    check(
        backend,
        q,
        k,
        v,
        d_lse=d_lse,
        sink=sink,
        causal=True,
        cu_seqlens_q=cu_q,
        cu_seqlens_kv=cu_kv,
    )
