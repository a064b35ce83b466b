"""NaN and infinity outside the mask, behind it, and in front of it.

Public reports: pytorch #101967, #141128. The reference is exact: an excluded pair adds nothing.
Another backend may spread a non-finite key row that some query reads to other rows of the same
sequence and head within 256 rows, as NaN, never further and never as a wrong finite number.
"""

import numpy as np
import pytest
from harness import (
    BACKWARD_BACKENDS,
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

from onchip.oracle import attention, compare

EXACT_BACKENDS = ("reference",)
SPREAD_ROWS = 256
BAD = [np.nan, np.inf, -np.inf]


def judge_with_spread(backend, q, k, v, **options):
    """The judge of a dense forward, with the freedom that the contract gives other backends."""
    o, lse = forward(backend, q, k, v, **options)
    if backend not in EXACT_BACKENDS:
        ref_o, ref_lse = attention.attention_forward(q, k, v, **options)
        for result, ref, row_axis in [(o, ref_o, 1), (lse, ref_lse, 2)]:
            # An lse of -inf is a row without keys.
            bad = np.isnan(ref) if ref.ndim == 3 else ~np.isfinite(ref)
            in_ref = np.moveaxis(bad, row_axis, -1)
            in_ref = in_ref if ref.ndim == 3 else in_ref.any(axis=2)  # [batch, head, row]
            near = in_ref.copy()
            for row in range(near.shape[-1]):
                near[..., row] = in_ref[..., max(0, row - SPREAD_ROWS) : row + SPREAD_ROWS + 1].any(
                    -1
                )
            allowed = near if ref.ndim == 3 else near.transpose(0, 2, 1)[..., None]
            spread = np.isnan(result) & ~np.isnan(ref) & allowed
            result[spread] = ref[spread]
    compare.judge_forward((o, lse), q, k, v, **options)
    return o, lse


def excluded_everywhere(kind, rng):
    """Options under which no query of any head reads keys 3 and 60..69 of 70."""
    if kind == "mask":
        mask = rng.random((2, 1, 50, 70)) < 0.7
        mask[..., 0] = True
        mask[..., [3, *range(60, 70)]] = False
        return dict(mask=mask)
    if kind == "bias":
        bias = draw(rng, (2, 4, 50, 70), np.float32)
        bias[..., [3, *range(60, 70)]] = -np.inf
        return dict(bias=bias)
    if kind == "segments":
        kv_ids = np.zeros((2, 70), np.int32)
        kv_ids[:, [3, *range(60, 70)]] = 1
        return dict(q_segment_ids=np.zeros((2, 50), np.int32), kv_segment_ids=kv_ids)
    if kind == "causal":
        # top_left: 50 queries read keys 0..49; the mask takes key 3.
        return dict(causal=True, alignment="top_left", mask=np.arange(70)[None, None, None] != 3)
    assert kind == "window"
    return dict(window=(7, 9), alignment="top_left", mask=np.arange(70)[None, None, None] != 3)


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("kind", ["mask", "bias", "segments", "causal", "window"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_a_key_nobody_reads_has_no_influence(backend, kind, bad, dtype):
    rng = np.random.default_rng(1)
    q, k, v = draw_qkv(rng, dtype, 2, 50, 70, heads=(4, 2))
    options = excluded_everywhere(kind, rng)
    clean = check(backend, q, k, v, **options)
    for rows in (3, slice(60, 70)):
        k[:, rows], v[:, rows] = bad, bad
    dirty = check(backend, q, k, v, **options)
    assert_same_bits(dirty[:2], clean[:2])
    if clean[2] is not None:
        assert_same_bits(dirty[2], clean[2])


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("where", ["k", "v"])
def test_a_key_that_later_rows_read_leaves_the_earlier_ones(backend, where, bad):
    rng = np.random.default_rng(2)
    q, k, v = draw_qkv(rng, np.float32, 2, 700, heads=(2, 1))
    (k if where == "k" else v)[1, 600] = bad
    o, _ = judge_with_spread(backend, q, k, v, causal=True)
    assert np.isfinite(o[0]).all() and np.isfinite(o[1, : 600 - SPREAD_ROWS]).all()


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_key_masked_for_some_rows_only(backend, bad):
    rng = np.random.default_rng(3)
    q, k, v = draw_qkv(rng, np.float32, 1, 40, heads=(2, 2))
    mask = np.ones((1, 2, 40, 40), bool)
    mask[0, 1] = np.arange(40) != 7  # head 1 never reads key 7
    mask[0, 0, 10:30, 7] = False
    k[0, 7], v[0, 7] = bad, bad
    o, _ = judge_with_spread(backend, q, k, v, mask=mask)
    assert np.isfinite(o[0, :, 1]).all()


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_excluded_pairs_in_the_backward(grad_backend, bad):
    """The reference's gradients are exact: what is excluded adds nothing."""
    rng = np.random.default_rng(4)
    q, k, v = draw_qkv(rng, np.float64, 1, 12, heads=(2, 1), dims=(5, 4))
    d_o = draw(rng, (1, 12, 2, 4), np.float64)
    v[0, 9] = bad
    o, lse = forward(grad_backend, q, k, v, causal=True)
    gradients = check_backward(grad_backend, d_o, q, k, v, o, lse, causal=True)
    assert np.isfinite(gradients.dq[0, :9]).all() and np.isnan(gradients.dq[0, 9:]).all()


def test_a_nan_query_is_its_own_affair(backend):
    rng = np.random.default_rng(5)
    q, k, v = draw_qkv(rng, np.float32, 2, 40, 50)
    clean = forward(backend, q, k, v)
    q[0, 0] = np.nan
    o, lse = forward(backend, q, k, v)
    compare.judge_forward((o, lse), q, k, v)
    assert np.isnan(o[0, 0]).all() and np.isnan(lse[0, :, 0]).all()
    assert_same_bits((o[0, 1:], lse[0, :, 1:]), (clean[0][0, 1:], clean[1][0, :, 1:]))
    assert_same_bits((o[1], lse[1]), (clean[0][1], clean[1][1]))


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("kind", ["q", "bias", "sink", "alibi_slopes"])
def test_a_nan_is_not_turned_into_a_number(backend, kind, bad):
    """A non-finite input that takes part in a row shows in that row's output."""
    rng = np.random.default_rng(6)
    q, k, v = draw_qkv(rng, np.float32, 1, 9, 11)
    options = dict(bias=draw(rng, (1, 2, 9, 11), np.float32), alibi_slopes=np.ones(2, np.float32))
    options["sink"] = np.zeros(2, np.float32)
    if kind == "q":
        q[0, 4, 1] = bad
    elif kind == "bias":
        options["bias"][0, 1, 4, 3] = bad
    else:
        options[kind][1] = bad
    o, lse = forward(backend, q, k, v, **options)
    compare.judge_forward((o, lse), q, k, v, **options)
    assert np.isfinite(o[:, :, 0]).all(), "head 0 is clean"


def test_a_poisoned_output_gradient_of_an_empty_row(grad_backend):
    rng = np.random.default_rng(7)
    q, k, v = draw_qkv(rng, np.float32, 1, 9, 5)
    d_o = draw(rng, q.shape, np.float32)
    o, lse = forward(grad_backend, q, k, v, causal=True)
    clean = check_backward(grad_backend, d_o, q, k, v, o, lse, causal=True)
    d_o[:, :4] = np.nan
    assert_same_bits(backward(grad_backend, d_o, q, k, v, o, lse, causal=True), clean)


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("where", ["q", "d_o", "d_lse"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_a_bad_row_reaches_the_gradients_of_what_it_sees(grad_backend, where, bad, dtype):
    """Row 70 of head 1: its own dQ, and dK and dV of the keys in its window, in its kv head."""
    rng = np.random.default_rng(8)
    window = dict(window=(20, 10))
    q, k, v = draw_qkv(rng, dtype, 2, 150, heads=(4, 2))
    d_o = draw(rng, q.shape, dtype)
    d_lse = draw(rng, (2, 4, 150), compare.lse_dtype(dtype))
    o, lse = forward(grad_backend, q, k, v, **window)
    clean = backward(grad_backend, d_o, q, k, v, o, lse, d_lse=d_lse, **window)
    if where == "q":
        q[1, 70, 1, 5] = bad
        o, lse = forward(grad_backend, q, k, v, **window)
    elif where == "d_o":
        d_o[1, 70, 1, 5] = bad
    else:
        d_lse[1, 1, 70] = bad
    dirty = check_backward(grad_backend, d_o, q, k, v, o, lse, d_lse=d_lse, **window)
    assert not np.isfinite(dirty.dq[1, 70, 1].astype(np.float64)).any()
    for name, rows, head in (("dq", 70, 1), ("dk", slice(50, 81), 0), ("dv", slice(50, 81), 0)):
        got, want = getattr(dirty, name), getattr(clean, name)
        got[1, rows, head] = want[1, rows, head]
        compare.assert_bitwise(name, got, want)


def test_exact_backends_have_a_backward():
    assert set(EXACT_BACKENDS) <= set(BACKWARD_BACKENDS)
