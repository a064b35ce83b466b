"""One key, one-hot rows, uniform rows of huge logits: softmax at its ends.

Public reports: flash-attention #334, #41, #1052.
"""

import numpy as np
import pytest
from harness import (
    BACKWARD_BACKENDS,
    BFLOAT16,
    DTYPES,
    backward,
    check,
    check_forward,
    draw_qkv,
    dtype_name,
    on_gpu,
)

from onchip.oracle import compare


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_softmax_over_one_token(backend, dtype):
    q, k, v = draw_qkv(np.random.default_rng(1), dtype, 2, 1, dims=(16, 16), size=3)
    o, _, _ = check(backend, q, k, v, d_o=v)
    compare.assert_bitwise("o", o, v)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("dims", [(16, 16), (7, 130)], ids=str)
def test_a_single_score_has_no_gradient(grad_backend, dims, dtype):
    """Softmax of one score is 1 whatever it is: dQ = dK = 0 exactly, dV is the sum of its dO."""
    rng = np.random.default_rng(6)
    q, k, v = draw_qkv(rng, dtype, 2, 33, 1, heads=(4, 2), dims=dims, size=3)
    _, _, of_one_key = check(grad_backend, q, k, v)
    _, _, of_one_token = check(grad_backend, q[:, :1, ::2], k, v, d_o=v)
    compare.assert_same_value("dv", of_one_token.dv, v)
    # Row i sees key 99 - i.
    q, k, v = draw_qkv(rng, dtype, 1, 100, dims=dims, size=3)
    mask = np.eye(100, dtype=bool)[None, None, ::-1]
    _, _, of_one_visible = check(grad_backend, q, k, v, d_o=v, mask=mask)
    compare.assert_same_value("dv", of_one_visible.dv, v[:, ::-1])
    for gradients in (of_one_key, of_one_token, of_one_visible):
        assert not np.asarray(gradients.dq, np.float64).any()
        assert not np.asarray(gradients.dk, np.float64).any()


def test_three_sigma_inputs_at_length_1024(backend):
    q, k, v = draw_qkv(
        np.random.default_rng(2), np.float16, 1, 1024, heads=(1, 1), dims=(128, 128), size=3
    )
    check(backend, q, k, v, causal=True)


def test_everything_is_a_thousand(backend):
    q = np.full((1, 512, 1, 32), 1000, BFLOAT16)
    o, lse = check_forward(backend, q, q, q)
    # All scores are equal, but fp32 cannot hold their products with scale: a common factor of P,
    # which a 16-bit P keeps only to half a unit.
    if not on_gpu():
        compare.assert_bitwise("o", o, q)
    assert np.isfinite(lse).all()
    if backend in BACKWARD_BACKENDS:
        # lse is near 6e6, where fp32 has a spacing of 0.5: exp(S - lse) is good to a factor only.
        gradients = backward(backend, q, q, q, q, o, lse)
        assert all(np.isfinite(np.asarray(x, np.float64)).all() for x in gradients[:3])


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_one_hot_rows(backend, dtype):
    q, k, v = draw_qkv(np.random.default_rng(3), dtype, 1, 130, 140, size=30)
    check(backend, q, k, v)
    check(backend, q, k, v, causal=True)


def test_scores_beyond_the_range_of_fp16(backend):
    """q.k = 1e6 is no fp16 number; the score is, after the scale, or stays in fp32."""
    rng = np.random.default_rng(4)
    q = np.full((1, 20, 1, 64), 125, np.float16)
    k = (125 + rng.integers(-2, 3, (1, 20, 1, 64))).astype(np.float16)
    v = rng.standard_normal((1, 20, 1, 64)).astype(np.float16)
    o, lse, _ = check(backend, q, k, v, scale=1e-3)
    assert np.isfinite(o.astype(np.float64)).all() and np.isfinite(lse).all()
    _, lse, _ = check(backend, q, k, v, scale=1.0)
    assert (lse > 65504).all() and np.isfinite(lse).all()


@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-6, 2.0, 40.0])
def test_any_finite_scale(backend, scale):
    q, k, v = draw_qkv(np.random.default_rng(5), np.float32, 1, 50, 60)
    check(backend, q, k, v, scale=scale)
