"""c tanh(S/c). Public reports: flash-attention #2402, #2466, #2544."""

import numpy as np
import pytest
from harness import DTYPES, check, draw, draw_qkv, dtype_name, forward

from onchip.oracle import compare


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("softcap", [0.0, 1.0, 15.0, 50.0])
def test_hot_scores(backend, softcap, dtype):
    q, k, v = draw_qkv(
        np.random.default_rng(1), dtype, 1, 128, 217, heads=(2, 1), dims=(32, 32), size=10
    )
    check(backend, q, k, v, softcap=softcap, causal=True)


@pytest.mark.parametrize("softcap", [0.0, 1.0, 15.0, 50.0])
def test_packed(backend, softcap):
    rng = np.random.default_rng(2)
    q = draw(rng, (128 + 33, 2, 32), np.float32, 10)
    k, v = (draw(rng, (217 + 40, 2, 32), np.float32, 10) for _ in range(2))
    cu = dict(
        cu_seqlens_q=np.array([0, 128, 161], np.int32),
        cu_seqlens_kv=np.array([0, 217, 257], np.int32),
    )
    check(backend, q, k, v, softcap=softcap, causal=True, **cu)


def test_it_comes_before_bias_alibi_and_mask(backend):
    """A bias far beyond the cap is not capped; a masked pair stays masked."""
    rng = np.random.default_rng(3)
    q, k, v = draw_qkv(rng, np.float32, 2, 40, size=4)
    bias = draw(rng, (1, 2, 40, 40), np.float32, 100)
    bias[..., 3] = -np.inf
    slopes = np.array([2.0, 0.1], np.float32)
    check(backend, q, k, v, softcap=0.5, bias=bias, alibi_slopes=slopes, causal=True)


def test_a_huge_cap_is_none(backend):
    q, k, v = draw_qkv(np.random.default_rng(4), np.float64, 1, 30)
    capped, _ = forward(backend, q, k, v, softcap=1e9)
    compare.assert_same_value("o", capped, forward(backend, q, k, v)[0])


def test_no_score_passes_the_cap(backend):
    """lse of n keys lies within log n +- c."""
    q, k, v = draw_qkv(np.random.default_rng(5), np.float32, 1, 64, size=100)
    _, lse, _ = check(backend, q, k, v, softcap=2.0)
    assert (np.abs(lse - np.log(64)) <= 2.0001).all()
