"""Packed sequences, slack rows, used lengths, hints.

Public reports: flash-attention #1537, #1619, #1773.
"""

import numpy as np
import pytest
from harness import (
    BFLOAT16,
    DTYPES,
    assert_same_bits,
    check,
    check_forward,
    draw,
    draw_qkv,
    dtype_name,
    forward,
)

import onchip
from onchip.oracle import compare


def test_grouped_heads_with_one_query_a_sequence(backend):
    rng = np.random.default_rng(1)
    q = draw(rng, (2, 9, 64), BFLOAT16)
    k, v = (draw(rng, (8, 3, 64), BFLOAT16) for _ in range(2))
    cu_q, cu_kv = np.array([0, 1, 1, 2], np.int32), np.array([0, 3, 3, 8], np.int32)
    for hint in [None, 1]:
        check(
            backend,
            q,
            k,
            v,
            causal=True,
            scale=1.0,
            cu_seqlens_q=cu_q,
            cu_seqlens_kv=cu_kv,
            max_seqlen_q=hint,
            max_seqlen_kv=5,
        )


def test_fewer_tokens_than_sequences(backend):
    rng = np.random.default_rng(2)
    q = draw(rng, (1, 21, 120), np.float32)
    k, v = (draw(rng, (1, 7, 120), np.float32) for _ in range(2))
    cu = np.array([0, 0, 0, 0, 1], np.int32)
    o, _, _ = check(backend, q, k, v, scale=120**0.5, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    compare.assert_bitwise("o", o, v.repeat(3, axis=1))


@pytest.mark.parametrize("hint", [0, 1, 128, 299, 300, 10**9])
def test_a_wrong_max_seqlen_changes_nothing(backend, hint):
    rng = np.random.default_rng(3)
    q, k, v = (draw(rng, (300, 2, 16), np.float32) for _ in range(3))
    cu = np.array([0, 300], np.int32)
    wanted = check_forward(backend, q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    hints = dict(max_seqlen_q=hint, max_seqlen_kv=hint)
    assert_same_bits(forward(backend, q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, **hints), wanted)


@pytest.mark.parametrize(
    "cu", [[0, 7, 5, 10], [0, 5, 11], [-1, 5, 10], [0, 5, 2**40], [11, 11, 11]], ids=str
)
@pytest.mark.parametrize("which", ["cu_seqlens_q", "cu_seqlens_kv"])
def test_impossible_boundaries_are_refused(backend, which, cu):
    q = np.ones((10, 1, 8), np.float32)
    good = dict(cu_seqlens_q=np.linspace(0, 10, len(cu)).astype(np.int64))
    good["cu_seqlens_kv"] = good["cu_seqlens_q"]
    with pytest.raises(onchip.InvalidArgument, match=which):
        forward(backend, q, q, q, **{**good, which: np.array(cu, np.int64)})


@pytest.mark.parametrize("length", [[5, 6], [5, -1]], ids=str)
@pytest.mark.parametrize("which", ["seqlens_q", "seqlens_kv"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_lengths_beyond_their_slot_are_refused(backend, packed, which, length):
    if packed:
        tensors = (np.ones((10, 1, 8), np.float32),) * 3
        options = dict(cu_seqlens_q=np.array([0, 5, 10], np.int32))
    else:
        tensors, options = (np.ones((2, 5, 1, 8), np.float32),) * 3, {}
    lengths = {"seqlens_q": np.array([5, 5], np.int32), "seqlens_kv": np.array([5, 5], np.int32)}
    lengths[which] = np.array(length, np.int32)
    with pytest.raises(onchip.InvalidArgument, match=which):
        forward(backend, *tensors, **options, **lengths)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_slack_rows_are_zero_and_never_read(backend, dtype):
    rng = np.random.default_rng(4)
    q, k, v = (draw(rng, (64, 2, 16), dtype) for _ in range(3))
    options = dict(
        cu_seqlens_q=np.array([0, 20, 30, 50], np.int32),
        cu_seqlens_kv=np.array([0, 16, 40, 60], np.int32),
        seqlens_q=np.array([17, 0, 20], np.int32),
        seqlens_kv=np.array([9, 24, 0], np.int32),
        causal=True,
    )
    used_q, used_kv = np.zeros(64, bool), np.zeros(64, bool)
    for n in range(3):
        used_q[options["cu_seqlens_q"][n] :][: options["seqlens_q"][n]] = True
        used_kv[options["cu_seqlens_kv"][n] :][: options["seqlens_kv"][n]] = True
    d_o = draw(rng, (64, 2, 16), dtype)
    clean = check(backend, q, k, v, d_o=d_o, **options)
    q[~used_q], d_o[~used_q] = np.nan, np.inf
    k[~used_kv], v[~used_kv] = np.nan, np.inf
    o, lse, gradients = check(backend, q, k, v, d_o=d_o, **options)
    assert_same_bits((o, lse), clean[:2])
    assert not o[~used_q].astype(np.float64).any() and np.isneginf(lse[:, ~used_q]).all()
    if gradients is not None:
        assert_same_bits(gradients, clean[2])
        assert not gradients.dq[~used_q].astype(np.float64).any()
        assert not gradients.dk[~used_kv].astype(np.float64).any()
        assert not gradients.dv[~used_kv].astype(np.float64).any()


def test_rows_before_between_and_after_the_sequences(backend):
    rng = np.random.default_rng(10)
    q, k, v = (draw(rng, (20, 2, 8), np.float32) for _ in range(3))
    o, lse, _ = check(
        backend,
        q,
        k,
        v,
        cu_seqlens_q=np.array([2, 9, 15], np.int32),
        cu_seqlens_kv=np.array([1, 1, 12], np.int32),
    )
    outside = np.r_[0:2, 15:20]
    assert not o[outside].any() and np.isneginf(lse[:, outside]).all()


def test_used_lengths_of_a_dense_batch(backend):
    rng = np.random.default_rng(5)
    q, k, v = draw_qkv(rng, np.float32, 3, 20, 31, heads=(4, 2))
    lengths = dict(
        seqlens_q=np.array([20, 0, 7], np.int64), seqlens_kv=np.array([31, 12, 3], np.int64)
    )
    q[2, 7:], k[2, 3:], v[1, 12:] = np.nan, np.nan, np.inf
    q[1], k[1], v[1] = np.nan, np.nan, np.nan
    o, lse, _ = check(backend, q, k, v, causal=True, **lengths)
    alone = forward(backend, q[2:, :7], k[2:, :3], v[2:, :3], causal=True)
    compare.assert_same_value("o", o[2:, :7], alone[0])
    compare.assert_same_value("lse", lse[2:, :, :7], alone[1])


def test_absent_kv_lengths_are_the_queries(backend):
    rng = np.random.default_rng(6)
    q, k, v = (draw(rng, (30, 2, 8), np.float32) for _ in range(3))
    cu, used = np.array([0, 12, 30], np.int32), np.array([9, 18], np.int32)
    wanted = check_forward(
        backend, q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, seqlens_q=used, seqlens_kv=used
    )
    assert_same_bits(forward(backend, q, k, v, cu_seqlens_q=cu, seqlens_q=used), wanted)
    dense = draw_qkv(rng, np.float32, 2, 20)
    wanted = check_forward(backend, *dense, seqlens_q=used, seqlens_kv=used)
    assert_same_bits(forward(backend, *dense, seqlens_q=used), wanted)


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_both_index_dtypes(backend, index_dtype):
    rng = np.random.default_rng(7)
    q, k, v = (draw(rng, (30, 2, 8), np.float32) for _ in range(3))
    cu = np.array([0, 12, 30], index_dtype)
    other = np.int64 if index_dtype == np.int32 else np.int32
    check(backend, q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu.astype(other))
    check(backend, q, k, v, cu_seqlens_q=cu, seqlens_q=np.array([3, 18], index_dtype))
    strided = np.repeat(cu, 3)[::3]
    assert strided.strides[0] != strided.itemsize
    check(backend, q, k, v, cu_seqlens_q=strided)


def test_a_sequence_does_not_know_its_neighbours(backend):
    """Other sequences' tokens may change to anything: its bits stay."""
    rng = np.random.default_rng(8)
    q, k, v = (draw(rng, (200, 2, 16), np.float32) for _ in range(3))
    cu = np.array([0, 1, 64, 65, 193, 200], np.int32)
    d_o = draw(rng, q.shape, np.float32)
    o, lse, gradients = check(backend, q, k, v, d_o=d_o, cu_seqlens_q=cu, causal=True)
    for x in (q, k, v, d_o):
        x[1:64] = np.nan
    changed_o, changed_lse, changed = check(backend, q, k, v, d_o=d_o, cu_seqlens_q=cu, causal=True)
    same = np.r_[0:1, 64:200]
    assert_same_bits((changed_o[same], changed_lse[:, same]), (o[same], lse[:, same]))
    if gradients is not None:
        assert_same_bits([x[same] for x in changed[:3]], [x[same] for x in gradients[:3]])


def test_many_short_sequences(backend):
    rng = np.random.default_rng(9)
    lengths = rng.integers(0, 4, 500)
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    q, k, v = (draw(rng, (cu[-1], 2, 8), np.float32) for _ in range(3))
    check(backend, q, k, v, cu_seqlens_q=cu, causal=True)
