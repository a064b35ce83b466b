"""Axes of length 0 and sequences of length 0. Public reports: flash-attention #2470, #2515, pytorch
#81077, #184330."""

import numpy as np
import pytest
from harness import BFLOAT16, check, check_forward, draw, draw_qkv, dtype_name, right_or_refused


@pytest.mark.parametrize("dtype", [np.float64, np.float32, BFLOAT16], ids=dtype_name)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("sizes", [(2, 5, 0), (2, 0, 5), (0, 5, 5), (2, 0, 0), (0, 0, 0)], ids=str)
def test_lengths_and_batch(backend, sizes, alignment, causal, dtype):
    q, k, v = draw_qkv(np.random.default_rng(1), dtype, *sizes, heads=(4, 2), dims=(8, 6))
    o, lse, gradients = check(backend, q, k, v, causal=causal, alignment=alignment)
    assert o.shape == (*sizes[:2], 4, 6) and not o.astype(np.float64).any()
    assert lse.shape == (sizes[0], 4, sizes[1]) and np.isneginf(lse).all()
    if gradients is not None:
        assert not any(x.astype(np.float64).any() for x in gradients[:3])


def test_no_heads(backend):
    q, k, v = draw_qkv(np.random.default_rng(2), np.float32, 2, 3, 4, heads=(0, 0))
    o, lse, _ = check(backend, q, k, v)
    assert o.shape == (2, 3, 0, 16) and lse.shape == (2, 0, 3)


def test_no_keys_with_every_option(backend):
    q, k, v = draw_qkv(np.random.default_rng(3), np.float32, 2, 5, 0, heads=(4, 2))
    sink = np.array([-1, 0, 1, 2], np.float32)
    o, lse, gradients = check(
        backend,
        q,
        k,
        v,
        bias=np.zeros((2, 4, 5, 0), np.float32),
        mask=np.ones((1, 1, 5, 0), bool),
        alibi_slopes=np.ones(4, np.float32),
        q_segment_ids=np.zeros((2, 5), np.int32),
        kv_segment_ids=np.zeros((2, 0), np.int32),
        sink=sink,
        softcap=2.0,
        window=(1, 1),
    )
    assert not o.any()
    np.testing.assert_array_equal(lse, np.broadcast_to(sink[:, None], lse.shape))
    if gradients is not None:
        assert gradients.dbias.shape == (2, 4, 5, 0) and not gradients.dsink.any()


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=dtype_name)
def test_sequences_of_length_zero(backend, dtype):
    rng = np.random.default_rng(4)
    q = draw(rng, (9, 2, 8), dtype)
    k, v = (draw(rng, (7, 2, 8), dtype) for _ in range(2))
    packed = dict(cu_seqlens_q=[0, 0, 4, 4, 9, 9], cu_seqlens_kv=[0, 2, 7, 7, 7, 7])
    packed = {name: np.array(value, np.int32) for name, value in packed.items()}
    for causal in [False, True]:
        check(backend, q, k, v, causal=causal, **packed)


def test_packed_without_any_sequence_or_token(backend):
    q = np.zeros((0, 2, 8), np.float32)
    for cu in [[0], [0, 0, 0]]:
        o, lse, _ = check(backend, q, q, q, cu_seqlens_q=np.array(cu, np.int32))
        assert o.shape == (0, 2, 8) and lse.shape == (2, 0)


def test_tokens_but_no_sequence(backend):
    """All rows are slack."""
    q = np.ones((3, 2, 8), np.float32)
    o, lse, gradients = check(backend, q, q, q, cu_seqlens_q=np.array([0], np.int32))
    assert not o.any() and np.isneginf(lse).all()
    if gradients is not None:
        assert not any(x.any() for x in gradients[:3])


@pytest.mark.parametrize("dims", [(0, 8), (8, 0), (0, 0)], ids=str)
def test_a_head_of_no_dimension_is_right_or_refused(backend, dims):
    """Without a direction every key weighs the same: the mean of v, never zeros."""
    q, k, v = draw_qkv(np.random.default_rng(5), np.float32, 1, 4, dims=dims)
    right_or_refused(lambda: check(backend, q, k, v), "head_dim", "256")


def test_one_of_everything(backend):
    q, k, v = draw_qkv(np.random.default_rng(6), np.float32, 1, 1, 1, heads=(1, 1), dims=(1, 1))
    check_forward(backend, q, k, v)
