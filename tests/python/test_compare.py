"""The judge must pass what is right and name what is wrong."""

import ml_dtypes
import numpy as np
import pytest

from onchip.oracle import attention, compare
from onchip.oracle.attention import Gradients
from onchip.oracle.compare import Disagreement, plain_arithmetic

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]


def case(dtype, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v, d_o = (rng.standard_normal((2, 24, 2, 16)).astype(dtype) for _ in range(4))
    options = dict(
        causal=True,
        bias=rng.standard_normal((1, 2, 24, 24)).astype(np.float32),
        sink=rng.standard_normal(2).astype(np.float32),
        # Row 5 of both batches sees nothing.
        mask=np.arange(24)[None, None, :, None] != 5,
    )
    return q, k, v, d_o, options


def forward_result(q, k, v, options):
    """What a right library returns: the plain formula in the dtype, lse in fp32 or fp64."""
    o, _ = attention.attention_forward(q, k, v, arithmetic=plain_arithmetic(q.dtype), **options)
    _, lse = attention.attention_forward(q, k, v, **options)
    return [o.astype(q.dtype), lse.astype(compare.lse_dtype(q.dtype))]


def backward_result(q, k, v, d_o, options):
    plain = attention.attention_backward(
        d_o, q, k, v, arithmetic=plain_arithmetic(q.dtype), **options
    )
    likes = (q, k, v, options.get("bias"), options.get("sink"))
    return Gradients(
        *(None if x is None else x.astype(like.dtype) for x, like in zip(plain, likes, strict=True))
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_plain_formula_passes(dtype):
    q, k, v, d_o, options = case(dtype)
    compare.judge_forward(forward_result(q, k, v, options), q, k, v, **options)
    compare.judge_backward(backward_result(q, k, v, d_o, options), d_o, q, k, v, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tensor", [0, 1])
def test_one_wrong_element_fails(dtype, tensor):
    q, k, v, _, options = case(dtype)
    result = forward_result(q, k, v, options)
    result[tensor][1, 1, 1] += 0.25
    with pytest.raises(Disagreement, match=r"worst at \(1, 1, 1") as failure:
        compare.judge_forward(result, q, k, v, **options)
    for word in ("o:" if tensor == 0 else "lse:", "got", "wanted", "error", "bound"):
        assert word in str(failure.value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", Gradients._fields)
def test_one_wrong_gradient_element_fails(dtype, name):
    q, k, v, d_o, options = case(dtype)
    result = backward_result(q, k, v, d_o, options)
    getattr(result, name).flat[1] += 4
    with pytest.raises(Disagreement, match=name):
        compare.judge_backward(result, d_o, q, k, v, **options)


@pytest.mark.parametrize("name", Gradients._fields)
def test_a_zero_gradient_fails(name):
    q, k, v, d_o, options = case(np.float32)
    result = backward_result(q, k, v, d_o, options)
    result = result._replace(**{name: np.zeros_like(getattr(result, name))})
    with pytest.raises(Disagreement, match=name):
        compare.judge_backward(result, d_o, q, k, v, **options)


@pytest.mark.parametrize("name", Gradients._fields)
def test_an_absent_or_unwanted_gradient_fails(name):
    q, k, v, d_o, options = case(np.float32)
    result = backward_result(q, k, v, d_o, options)
    with pytest.raises(Disagreement, match=f"{name}: got None"):
        compare.judge_backward(result._replace(**{name: None}), d_o, q, k, v, **options)
    if name in ("dbias", "dsink"):
        del options[name[1:]]
        unwanted = backward_result(q, k, v, d_o, options)._replace(**{name: getattr(result, name)})
        with pytest.raises(Disagreement, match=f"{name}: got an array, wanted None"):
            compare.judge_backward(unwanted, d_o, q, k, v, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_zero_output_fails(dtype):
    q, k, v, _, options = case(dtype)
    result = forward_result(q, k, v, options)
    result[0][:] = 0
    with pytest.raises(Disagreement, match="o: worst"):
        compare.judge_forward(result, q, k, v, **options)


def test_a_nan_in_the_result_fails():
    q, k, v, _, options = case(np.float32)
    result = forward_result(q, k, v, options)
    result[0][0, 3, 1, 2] = np.nan
    with pytest.raises(Disagreement, match=r"o: NaN in the wrong place at \(0, 3, 1, 2\)"):
        compare.judge_forward(result, q, k, v, **options)


def test_a_missing_nan_fails():
    q, k, v, _, options = case(np.float32)
    q[0, 7, 0] = np.nan
    result = forward_result(q, k, v, options)
    compare.judge_forward(result, q, k, v, **options)
    swapped = [result[0].copy(), result[1]]
    swapped[0][0, [7, 8], 0] = swapped[0][0, [8, 7], 0]
    with pytest.raises(Disagreement, match=r"o: NaN in the wrong place"):
        compare.judge_forward(swapped, q, k, v, **options)


def test_a_shifted_minus_inf_fails():
    q, k, v, _, options = case(np.float32)
    del options["sink"]
    result = forward_result(q, k, v, options)
    assert np.isneginf(result[1][:, :, 5]).all()
    compare.judge_forward(result, q, k, v, **options)
    shifted = [result[0], np.roll(result[1], 1, axis=2)]
    with pytest.raises(Disagreement, match="lse: -inf in the wrong place"):
        compare.judge_forward(shifted, q, k, v, **options)
    flipped = [result[0], np.where(np.isneginf(result[1]), np.float32(np.inf), result[1])]
    with pytest.raises(Disagreement, match="inf in the wrong place"):
        compare.judge_forward(flipped, q, k, v, **options)
    finite = [result[0], np.maximum(result[1], np.float32(-1e30))]
    with pytest.raises(Disagreement, match="-inf in the wrong place"):
        compare.judge_forward(finite, q, k, v, **options)


def test_wrong_dtype_or_shape_fails():
    q, k, v, _, options = case(np.float16)
    o, lse = forward_result(q, k, v, options)
    with pytest.raises(Disagreement, match="o: float32"):
        compare.judge_forward((o.astype(np.float32), lse), q, k, v, **options)
    with pytest.raises(Disagreement, match="lse: float64"):
        compare.judge_forward((o, lse.astype(np.float64)), q, k, v, **options)
    with pytest.raises(Disagreement, match="lse: float32"):
        compare.judge_forward((o, lse.swapaxes(1, 2)), q, k, v, **options)


def test_bounds_are_of_the_size_the_page_says():
    """An error of ten times the dtype's rounding is refused; half of it is not."""
    for dtype, eps in [(np.float32, 1e-5), (np.float16, 2.0**-10), (ml_dtypes.bfloat16, 2.0**-7)]:
        q, k, v, _, _ = case(dtype)
        o, lse = forward_result(q, k, v, {})
        exact, _ = attention.attention_forward(q, k, v)
        top = np.abs(exact).max()
        compare.judge_forward((o, lse), q, k, v)
        off = exact.copy()
        off[0, 0, 0, 0] += 10 * eps * top
        with pytest.raises(Disagreement):
            compare.judge_forward((off.astype(dtype), lse), q, k, v)
        near = exact.copy()
        near[0, 0, 0, 0] += 0.4 * eps * top
        compare.judge_forward((near.astype(dtype), lse), q, k, v)


@pytest.mark.parametrize("value", [1.0, 1.5, 0.75, 3.0, 65504.0, 1e-3, 0.0, 5e-8])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_ulp_is_numpys_spacing(value, dtype):
    value = float(dtype(value))
    if dtype == np.float16 and value == 65504.0:
        assert compare._ulp(value, np.dtype(dtype)) == 32.0  # numpy's spacing overflows here
    else:
        assert compare._ulp(value, np.dtype(dtype)) == float(np.spacing(dtype(value)))


def test_bitwise_sees_signed_zero_and_one_bit():
    a = np.zeros((2, 3), np.float32)
    b = a.copy()
    compare.assert_bitwise("x", a, b)
    b[1, 2] = -0.0
    with pytest.raises(Disagreement, match=r"x: bits differ at \(1, 2\)"):
        compare.assert_bitwise("x", a, b)
    compare.assert_bitwise("x", np.full(2, np.nan), np.full(2, np.nan))


def test_merge_judge():
    rng = np.random.default_rng(1)
    o1, o2 = (rng.standard_normal((1, 4, 2, 3)).astype(np.float32) for _ in range(2))
    lse1, lse2 = (rng.standard_normal((1, 2, 4)).astype(np.float32) for _ in range(2))
    lse1[0, 0, 0] = lse1[0, 1, 1] = lse2[0, 1, 1] = -np.inf
    o1[0, 0, 0] = o1[0, 1, 1] = o2[0, 1, 1] = 0
    o, lse = (x.astype(np.float32) for x in attention.merge(o1, lse1, o2, lse2))
    compare.judge_merge((o, lse), o1, lse1, o2, lse2)
    with pytest.raises(Disagreement, match="lse"):
        compare.judge_merge((o, lse + np.float32(0.01)), o1, lse1, o2, lse2)
    with pytest.raises(Disagreement, match="o: worst"):
        compare.judge_merge((o1, lse), o1, lse1, o2, lse2)
