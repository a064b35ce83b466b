"""Rows that see no key: output 0, lse -inf (or the sink), gradients 0, nothing leaks into others.

Public reports: flash-attention #1778, #2199, #1366, flashinfer #4452, cutlass #2336.
"""

import numpy as np
import pytest
from harness import (
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

from onchip.oracle import compare


def assert_empty(rows, o, lse, sink=None):
    """rows: boolean over the query rows of a dense batch."""
    assert not np.asarray(o[:, rows], np.float64).any()
    wanted = np.full(lse.shape[1], -np.inf) if sink is None else np.asarray(sink, lse.dtype)
    np.testing.assert_array_equal(
        lse[:, :, rows], np.broadcast_to(wanted[:, None], lse[:, :, rows].shape)
    )


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=dtype_name)
@pytest.mark.parametrize("lengths", [(5, 2), (65, 64), (257, 128)], ids=str)
def test_bottom_right_causal_with_more_queries_than_keys(backend, dtype, lengths):
    seqlen_q, seqlen_kv = lengths
    rng = np.random.default_rng(seqlen_q)
    q, k, v = draw_qkv(rng, dtype, 1, seqlen_q, seqlen_kv, dims=(64, 64))
    o, lse, _ = check(backend, q, k, v, causal=True)
    empty = np.arange(seqlen_q) < seqlen_q - seqlen_kv
    assert_empty(empty, o, lse)
    last_o, last_lse = forward(backend, q[:, ~empty], k, v, causal=True)
    compare.assert_same_value("o", o[:, ~empty], last_o)
    compare.assert_same_value("lse", lse[:, :, ~empty], last_lse)


@pytest.mark.parametrize("lengths", [(5, 2), (65, 64)], ids=str)
def test_empty_rows_add_nothing_to_the_gradients(grad_backend, lengths):
    seqlen_q, seqlen_kv = lengths
    rng = np.random.default_rng(3)
    q, k, v = draw_qkv(rng, np.float32, 1, seqlen_q, seqlen_kv)
    d_o = draw(rng, q.shape, np.float32)
    o, lse = forward(grad_backend, q, k, v, causal=True)
    gradients = check_backward(grad_backend, d_o, q, k, v, o, lse, causal=True)
    empty = slice(0, seqlen_q - seqlen_kv)
    assert not gradients.dq[:, empty].any()
    q[:, empty], d_o[:, empty] = 1e4, -1e4
    again = backward(grad_backend, d_o, q, k, v, o, lse, causal=True)
    assert_same_bits(again, gradients)


def emptied_by(kind, rng, dtype):
    """(q, k, v, options, empty rows): every way a row can be left without keys."""
    q, k, v = draw_qkv(rng, dtype, 2, 40, 33, heads=(4, 2), dims=(20, 12))
    empty = np.zeros(40, bool)
    if kind == "causal":
        empty[:7] = True
        return q, k, v, dict(causal=True), empty
    if kind == "window":
        empty[:7] = True  # off = -7: keys up to i - 7
        return q, k, v, dict(window=(3, 0)), empty
    if kind == "window past the end":
        empty[34:] = True  # keys from i - 1
        return q, k, v, dict(window=(1, 2), alignment="top_left"), empty
    empty[[0, 5, 39]] = True
    if kind == "mask":
        mask = rng.random((2, 1, 40, 33)) < 0.5
        mask[..., 0] = True
        mask[:, :, empty] = False
        return q, k, v, dict(mask=mask), empty
    if kind == "bias":
        bias = draw(rng, (1, 4, 40, 33), np.float32)
        bias[:, :, empty] = -np.inf
        return q, k, v, dict(bias=bias), empty
    if kind == "segments":
        q_ids = np.full((2, 40), 7, np.int32)
        q_ids[:, empty] = -1
        return (
            q,
            k,
            v,
            dict(q_segment_ids=q_ids, kv_segment_ids=np.full((2, 33), 7, np.int32)),
            empty,
        )
    if kind == "lengths":
        empty[:] = True
        lengths = dict(seqlens_q=np.array([40, 40], np.int32), seqlens_kv=np.zeros(2, np.int32))
        return q, k, v, lengths, empty
    assert kind == "mask and bias together"
    mask = np.ones((1, 1, 40, 33), bool)
    mask[:, :, empty, :20] = False
    bias = np.zeros((1, 1, 40, 33), np.float32)
    bias[:, :, empty, 20:] = -np.inf
    return q, k, v, dict(mask=mask, bias=bias), empty


KINDS = [
    "causal",
    "window",
    "window past the end",
    "mask",
    "bias",
    "segments",
    "lengths",
    "mask and bias together",
]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("with_sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_leave_a_row_without_keys(backend, kind, with_sink, dtype):
    rng = np.random.default_rng(KINDS.index(kind))
    q, k, v, options, empty = emptied_by(kind, rng, dtype)
    sink = np.array([-5, 0.5, 100, 2], np.float32) if with_sink else None
    d_lse = draw(rng, (2, 4, 40), compare.lse_dtype(dtype))
    o, lse, gradients = check(backend, q, k, v, d_lse=d_lse, sink=sink, **options)
    assert_empty(empty, o, lse, sink)
    if gradients is not None:
        assert not np.asarray(gradients.dq[:, empty], np.float64).any()


def test_window_with_more_queries_than_keys(backend):
    """Off = -97: rows 0..32 would see keys below 0 only."""
    rng = np.random.default_rng(12)
    q, k, v = draw_qkv(rng, np.float32, 1, 129, 32)
    d_o = draw(rng, q.shape, np.float32)
    o, lse, gradients = check(backend, q, k, v, d_o=d_o, window=(32, 64))
    assert_empty(np.arange(129) < 33, o, lse)
    assert np.isfinite(lse[:, :, 33:]).all()
    if gradients is not None:
        d_o[:, :33] = 1e4
        again = backward(backend, d_o, q, k, v, o, lse, window=(32, 64))
        assert_same_bits(again, gradients)


def test_an_empty_row_does_not_read_its_query(backend):
    q, k, v = draw_qkv(np.random.default_rng(2), np.float32, 1, 6, 3)
    q[:, 1] = np.nan
    q[:, 2] = np.inf
    o, lse = check_forward(backend, q, k, v, causal=True)
    assert_empty(np.arange(6) < 3, o, lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_rows_that_are_nearly_empty(backend, dtype):
    """One visible key, at every position against the tile edges: the row is that key's value."""
    q, k, v = draw_qkv(np.random.default_rng(4), dtype, 1, 70, 70, heads=(1, 1), dims=(8, 8))
    mask = np.eye(70, dtype=bool)[None, None]
    o, _, _ = check(backend, q, k, v, mask=mask)
    compare.assert_bitwise("o", o, v)
