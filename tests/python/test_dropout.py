"""Dropout: one mask everywhere, read off the output.

Public reports: flash-attention #612, #1251, #314, aws-neuron nki-samples #81.
"""

import numpy as np
import pytest
from harness import DTYPES, assert_same_bits, check, draw, draw_qkv, dtype_name, forward

import onchip
from onchip.oracle import compare
from onchip.oracle.philox import dropout_keep, dropout_threshold


def rng_state(seed, offset):
    return np.array([seed, offset], np.int64)


def observed_keep(backend, p, state, shape, heads=2, batch=2):
    """v = identity reads P M / (1 - p) out of o; q = 0 makes every P equal."""
    seqlen_q, seqlen_kv = shape
    q, k, _ = draw_qkv(
        np.random.default_rng(0), np.float32, batch, seqlen_q, seqlen_kv, (heads, heads)
    )
    v = np.broadcast_to(
        np.eye(seqlen_kv, dtype=np.float32)[None, :, None], (batch, seqlen_kv, heads, seqlen_kv)
    )
    o, _ = forward(backend, 0 * q, k, v, dropout_p=p, dropout_rng=state)
    return o.transpose(0, 2, 1, 3) > 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_mask_is_the_documented_one(backend, p):
    state = rng_state(0x1234567890ABCDE, 99)
    keep = observed_keep(backend, p, state, (70, 50))
    for b in range(2):
        np.testing.assert_array_equal(keep[b], dropout_keep(p, state, b, 2, 70, 50))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("offset", [0, 2**31, 2**32 - 1])
def test_all_64_seed_bits_and_32_offset_bits_count(backend, seed, offset):
    keep = observed_keep(backend, 0.5, rng_state(seed, offset), (20, 20), batch=1)
    np.testing.assert_array_equal(keep[0], dropout_keep(0.5, rng_state(seed, offset), 0, 2, 20, 20))


def test_keep_rate(backend):
    p = 0.3
    keep = observed_keep(backend, p, rng_state(5, 7), (64, 64), heads=4, batch=4)
    deviation = (p * (1 - p) / keep.size) ** 0.5
    assert abs(keep.mean() - (1 - p)) < 5 * deviation
    # Heads, sequences and neighbours are independent: agreement is chance.
    chance = p**2 + (1 - p) ** 2
    for a, b in [(keep[0], keep[1]), (keep[:, 0], keep[:, 1]), (keep[..., :-1], keep[..., 1:])]:
        assert abs((a == b).mean() - chance) < 5 * (0.25 / a.size) ** 0.5


def test_seed_and_offset_decide_the_mask(backend):
    first = observed_keep(backend, 0.5, rng_state(1, 0), (32, 32))
    np.testing.assert_array_equal(observed_keep(backend, 0.5, rng_state(1, 0), (32, 32)), first)
    assert (observed_keep(backend, 0.5, rng_state(1, 1), (32, 32)) != first).any()
    assert (observed_keep(backend, 0.5, rng_state(2, 0), (32, 32)) != first).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("p", [0.15, 0.6])
def test_output_and_gradients_use_that_very_mask(backend, p, dtype):
    rng = np.random.default_rng(2)
    q, k, v = draw_qkv(rng, dtype, 2, 45, 70, heads=(4, 2))
    d_lse = draw(rng, (2, 4, 45), compare.lse_dtype(dtype))
    dropped = dict(dropout_p=p, dropout_rng=rng_state(42, 3))
    check(backend, q, k, v, d_lse=d_lse, causal=True, **dropped)
    bias = draw(rng, (1, 4, 45, 70), np.float32)
    sink = draw(rng, (4,), np.float32)
    check(backend, q, k, v, d_lse=d_lse, bias=bias, sink=sink, softcap=3.0, **dropped)


def test_positions_are_the_sequences_own(backend):
    rng = np.random.default_rng(3)
    q, k, v = (draw(rng, (60, 2, 8), np.float32) for _ in range(3))
    cu = np.array([0, 10, 10, 37, 60], np.int32)
    check(backend, q, k, v, cu_seqlens_q=cu, dropout_p=0.4, dropout_rng=rng_state(1, 2))
    dense = draw_qkv(rng, np.float32, 2, 30)
    lengths = np.array([13, 30], np.int32)
    check(backend, *dense, seqlens_q=lengths, dropout_p=0.4, dropout_rng=rng_state(1, 2))


@pytest.mark.parametrize("p", [0.0, 0.4 / 65536])
def test_p_that_drops_nothing_is_no_dropout_bit_for_bit(backend, p):
    assert dropout_threshold(p) == 0
    q, k, v = draw_qkv(np.random.default_rng(4), np.float32, 2, 40)
    wanted = check(backend, q, k, v, causal=True)
    got = check(backend, q, k, v, causal=True, dropout_p=p, dropout_rng=rng_state(1, 2))
    assert_same_bits(got[:2], wanted[:2])
    if wanted[2] is not None:
        assert_same_bits(got[2], wanted[2])


def test_a_row_may_lose_every_key(backend):
    """One visible key, dropped: o = 0, lse as without dropout, gradients finite."""
    q, k, v = draw_qkv(np.random.default_rng(5), np.float32, 1, 64, 1)
    o, lse, _ = check(backend, q, k, v, dropout_p=0.5, dropout_rng=rng_state(3, 4))
    kept = dropout_keep(0.5, rng_state(3, 4), 0, 2, 64, 1)[:, :, 0].T
    assert not kept.all() and kept.any()
    assert not o[0][~kept].any() and o[0][kept].all() and np.isfinite(lse).all()


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, np.nan, np.inf])
def test_p_outside_its_range_is_refused(backend, p):
    q, k, v = draw_qkv(np.random.default_rng(6), np.float32)
    with pytest.raises(onchip.InvalidArgument, match="dropout_p"):
        forward(backend, q, k, v, dropout_p=p, dropout_rng=rng_state(1, 2))


@pytest.mark.parametrize("offset", [-1, 2**32])
def test_an_offset_of_more_than_32_bits_is_refused(backend, offset):
    q, k, v = draw_qkv(np.random.default_rng(7), np.float32)
    with pytest.raises(onchip.InvalidArgument, match="dropout_rng"):
        forward(backend, q, k, v, dropout_p=0.5, dropout_rng=rng_state(1, offset))


def test_dropout_needs_its_state(backend):
    q, k, v = draw_qkv(np.random.default_rng(8), np.float32)
    with pytest.raises(onchip.InvalidArgument, match="dropout_rng"):
        forward(backend, q, k, v, dropout_p=0.5)
