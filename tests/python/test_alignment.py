"""Where the diagonal of causal, window and ALiBi lies when the lengths differ.

Public reports: flash-attention #282, #436, #517, pytorch #110144, cutlass #2336.
"""

import numpy as np
import pytest
from harness import BFLOAT16, check, check_forward, draw_qkv, dtype_name, forward

from onchip.oracle import compare

LENGTHS = [(1, 128), (3, 128), (2, 5), (100, 229), (16, 16), (5, 2)]


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=dtype_name)
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_causal(backend, lengths, alignment, dtype):
    q, k, v = draw_qkv(np.random.default_rng(1), dtype, 2, *lengths, heads=(4, 2), dims=(32, 16))
    check(backend, q, k, v, causal=True, alignment=alignment)


@pytest.mark.parametrize("lengths", [pair for pair in LENGTHS if pair[0] < pair[1]], ids=str)
def test_bottom_right_is_the_end_of_the_square_and_top_left_its_beginning(backend, lengths):
    seqlen_q, seqlen_kv = lengths
    q, k, v = draw_qkv(np.random.default_rng(2), np.float64, 1, seqlen_kv)
    square_o, square_lse = forward(backend, q, k, v, causal=True)
    o, lse = forward(backend, q[:, -seqlen_q:], k, v, causal=True)
    compare.assert_same_value("o", o, square_o[:, -seqlen_q:])
    compare.assert_same_value("lse", lse, square_lse[:, :, -seqlen_q:])
    o, lse = forward(backend, q[:, :seqlen_q], k, v, causal=True, alignment="top_left")
    compare.assert_same_value("o", o, square_o[:, :seqlen_q])
    compare.assert_same_value("lse", lse, square_lse[:, :, :seqlen_q])


@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_window_and_alibi_share_the_diagonal(backend, lengths, alignment):
    q, k, v = draw_qkv(np.random.default_rng(3), np.float32, 2, *lengths)
    slopes = np.array([0.5, 0.0625], np.float32)
    check(backend, q, k, v, window=(7, 3), alibi_slopes=slopes, alignment=alignment)


@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
def test_the_diagonal_is_each_sequences_own(backend, alignment):
    rng = np.random.default_rng(4)
    cu_q = np.array([0, 3, 20, 21], np.int32)
    cu_kv = np.array([0, 9, 14, 64], np.int32)
    q = rng.standard_normal((21, 2, 8)).astype(np.float32)
    k, v = (rng.standard_normal((64, 2, 8)).astype(np.float32) for _ in range(2))
    check(
        backend, q, k, v, causal=True, alignment=alignment, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv
    )
    dense = draw_qkv(rng, np.float32, 3, 10, 17)
    lengths = dict(
        seqlens_q=np.array([10, 4, 0], np.int64), seqlens_kv=np.array([3, 17, 9], np.int64)
    )
    check(backend, *dense, causal=True, alignment=alignment, **lengths)


def test_causal_is_the_lower_triangle_as_a_mask(backend):
    q, k, v = draw_qkv(np.random.default_rng(5), np.float32, 1, 67)
    o, lse = check_forward(backend, q, k, v, causal=True)
    masked_o, masked_lse = check_forward(backend, q, k, v, mask=np.tri(67, dtype=bool)[None, None])
    compare.assert_same_value("o", o, masked_o)
    compare.assert_same_value("lse", lse, masked_lse)
