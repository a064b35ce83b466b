"""Sliding windows: both edges, wide and narrow. Public reports: flash-attention #1133, transformers
#39408 and #29623."""

import numpy as np
import pytest
from harness import check, draw_qkv, forward

from onchip.oracle import attention, compare

WIDEST = 2**63 - 1


@pytest.mark.parametrize("seqlen", [130, 1024])
def test_a_window_as_wide_as_the_sequence_is_causal(backend, seqlen):
    q, k, v = draw_qkv(np.random.default_rng(1), np.float32, 1, seqlen, heads=(1, 1))
    causal_o, causal_lse, gradients = check(backend, q, k, v, causal=True)
    for window in [(seqlen, 0), (seqlen - 1, 0), (-1, 0), (2**40, 0)]:
        o, lse = forward(backend, q, k, v, window=window)
        compare.assert_same_value("o", o, causal_o)
        compare.assert_same_value("lse", lse, causal_lse)
        if gradients is not None:
            check(backend, q, k, v, window=window)


@pytest.mark.parametrize("lengths", [(33, 40), (40, 33)], ids=str)
@pytest.mark.parametrize("window", [(-1, WIDEST), (WIDEST, -1), (WIDEST, WIDEST)], ids=str)
def test_the_widest_window_is_none(backend, window, lengths):
    """No sum with its bounds wraps, neither in a backend nor in the judge."""
    q, k, v = draw_qkv(np.random.default_rng(5), np.float32, 1, *lengths)
    wanted = attention.attention_forward(q, k, v)
    for judged, exact in zip(
        attention.attention_forward(q, k, v, window=window), wanted, strict=True
    ):
        compare.assert_bitwise("judge", judged, exact)
    check(backend, q, k, v, window=window)


@pytest.mark.parametrize("left", [0, 1, 15, 16, 63, 64])
def test_a_left_window_sees_exactly_one_key_more_than_its_width(backend, left):
    """With q = 0 every visible key weighs the same: lse counts them and o is their mean."""
    _, k, v = draw_qkv(np.random.default_rng(2), np.float64, 1, 130, heads=(1, 1))
    q = np.zeros_like(k)
    o, lse, _ = check(backend, q, k, v, window=(left, 0))
    visible = np.minimum(np.arange(130), left) + 1
    compare.assert_same_value("lse", lse[0, 0], np.log(visible))
    wanted = [v[0, i + 1 - n : i + 1, 0].mean(0) for i, n in enumerate(visible)]
    compare.assert_same_value("o", o[0, :, 0], np.stack(wanted))


def test_a_window_of_one_key_returns_its_value(backend):
    q, k, v = draw_qkv(np.random.default_rng(3), np.float32, 2, 77)
    o, _, _ = check(backend, q, k, v, window=(0, 0))
    compare.assert_bitwise("o", o, v)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "window", [(0, 5), (5, 0), (-1, 3), (3, -1), (16, 16), (63, 64), (0, -1)], ids=str
)
@pytest.mark.parametrize("lengths", [(67, 67), (33, 90), (90, 33)], ids=str)
def test_both_edges_with_lengths_that_differ(backend, lengths, window, causal):
    q, k, v = draw_qkv(np.random.default_rng(4), np.float32, 1, *lengths)
    check(backend, q, k, v, window=window, causal=causal)
