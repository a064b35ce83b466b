"""The judge: section 5 of docs/semantics.md as code, and the only place that holds tolerances.

`judge_*` take the inputs (already rounded to the dtype under test), the options and the library's
result. They compute the fp64 reference and y, the plain formula with every intermediate rounded to
the dtype, and raise `Disagreement` unless the result is as close to the reference as the page asks.
They return where each tensor came closest to its bound.
"""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from . import attention, decode
from .attention import EXACT, Arithmetic

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)


class Disagreement(AssertionError):
    pass


class Deviation(NamedTuple):
    """The element of a tensor whose error is the largest share of its bound."""

    tensor: str
    at: tuple
    got: float
    wanted: float
    error: float
    bound: float
    share: float

    def __str__(self):
        return (
            f"{self.tensor}: worst at {self.at}: got {self.got:.9g}, wanted {self.wanted:.9g},"
            f" error {self.error:.3e}, bound {self.bound:.3e}: {self.share:.3g} x"
        )


def plain_arithmetic(dtype):
    """Every intermediate stored in `dtype`, products, sums and lse in fp32 (fp64 for fp64)."""
    dtype = np.dtype(dtype)
    return Arithmetic(lse_dtype(dtype), dtype, lse_dtype(dtype))


def lse_dtype(dtype):
    return FLOAT64 if np.dtype(dtype) == FLOAT64 else FLOAT32


def _largest(x):
    """The largest finite magnitude; 0 where there is none."""
    magnitude = np.abs(np.asarray(x, np.float64))
    return float(np.max(magnitude, where=np.isfinite(magnitude), initial=0.0))


def _ulp(value, dtype):
    """Distance from |value| to the next larger number of `dtype`."""
    info = ml_dtypes.finfo(dtype)
    if value <= float(info.tiny):
        return float(info.smallest_subnormal)
    # frexp: value = m 2^e with m in [1/2, 1), so its binade starts at 2^(e-1).
    return float(info.eps) * 2.0 ** (np.frexp(value)[1] - 1)


def _rounding_bound(ref, y, dtype, factor):
    """factor * max|y - ref| plus the dtype's own term."""
    ref64 = np.asarray(ref, np.float64)
    if dtype == FLOAT64:
        return 1e-11 * _largest(ref64)
    with np.errstate(invalid="ignore"):
        plain_error = _largest(np.asarray(y, np.float64) - ref64)
    own = 1e-5 * _largest(ref64) if dtype == FLOAT32 else _ulp(_largest(ref64), dtype)
    return factor * plain_error + own


def assert_close(name, result, ref, bound):
    """|result - ref| <= bound (an array or a number); NaN, +inf and -inf at the same positions.

    Returns the worst element; None of an empty array."""
    result64, ref64 = np.asarray(result).astype(np.float64), np.asarray(ref).astype(np.float64)
    if result64.shape != ref64.shape:
        raise Disagreement(f"{name}: shape {result64.shape}, wanted {ref64.shape}")
    for what, where in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        misplaced = where(result64) != where(ref64)
        if misplaced.any():
            at = tuple(int(x) for x in np.argwhere(misplaced)[0])
            raise Disagreement(
                f"{name}: {what} in the wrong place at {at}: got {result64[at]}, wanted {ref64[at]}"
                f" ({int(misplaced.sum())} of {misplaced.size} positions)"
            )
    finite = np.isfinite(ref64)
    error = np.abs(np.where(finite, result64, 0) - np.where(finite, ref64, 0))
    if not error.size:
        return None
    bound = np.broadcast_to(bound, error.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(error == 0, 0.0, error / bound)
    at = tuple(int(x) for x in np.unravel_index(np.argmax(share), share.shape))
    worst = Deviation(
        *(name, at, float(result64[at]), float(ref64[at])),
        *(float(error[at]), float(bound[at]), float(share[at])),
    )
    beyond = int((error > bound).sum())
    if beyond:
        raise Disagreement(f"{worst} ({beyond} of {error.size} elements beyond it)")
    return worst


def _overflowed(ref, dtype):
    """A number beyond the dtype's largest is infinite there."""
    with np.errstate(over="ignore"):
        stored = ref.astype(dtype).astype(np.float64)
    return np.where(np.isinf(stored), stored, ref)


def _assert_array(name, result, shape, dtype):
    result = np.asarray(result)
    if result.shape != tuple(shape) or result.dtype != np.dtype(dtype):
        raise Disagreement(
            f"{name}: {result.dtype} {result.shape}, wanted {np.dtype(dtype)} {tuple(shape)}"
        )


def _assert_lse(name, result, ref, dtype):
    relative = 1e-12 if dtype == FLOAT64 else 1e-5
    ref = _overflowed(ref, lse_dtype(dtype))
    finite_ref = np.where(np.isfinite(ref), ref, 0)
    return assert_close(name, result, ref, relative * np.maximum(1, np.abs(finite_ref)))


def _found(*deviations):
    return [deviation for deviation in deviations if deviation is not None]


def _factor(options):
    return 3 if options.get("softcap", 0) > 0 else 2


def judge_forward(result: Any, q: Any, k: Any, v: Any, **options: Any) -> list[Deviation]:
    """Check (o, lse) of attention_forward."""
    o, lse = result
    ref_o, ref_lse = attention.attention_forward(q, k, v, arithmetic=EXACT, **options)
    plain_o, _ = attention.attention_forward(
        q, k, v, arithmetic=plain_arithmetic(q.dtype), **options
    )
    _assert_array("o", o, ref_o.shape, q.dtype)
    _assert_array("lse", lse, ref_lse.shape, lse_dtype(q.dtype))
    worst_lse = _assert_lse("lse", lse, ref_lse, q.dtype)
    bound = _rounding_bound(ref_o, plain_o, q.dtype, _factor(options))
    # Probabilities below the smallest normal number of the arithmetic may be flushed to 0.
    bound += float(ml_dtypes.finfo(lse_dtype(q.dtype)).tiny) * k.shape[-3] * _largest(v)
    return _found(assert_close("o", o, _overflowed(ref_o, q.dtype), bound), worst_lse)


def judge_decode(
    result: Any, caches_after: Any, q: Any, k_cache: Any, v_cache: Any, **arguments: Any
) -> list[Deviation]:
    """Check (o, lse) of attention_decode, and the caches that it leaves, given as it found them.

    What it appends is exact, so is everything that it leaves alone.
    """
    o, lse = result
    ref_o, ref_lse, *ref_caches = decode.attention_decode(
        q, k_cache, v_cache, arithmetic=EXACT, **arguments
    )
    plain_o, *_ = decode.attention_decode(
        q, k_cache, v_cache, arithmetic=plain_arithmetic(q.dtype), **arguments
    )
    for name, got, wanted in zip(("k_cache", "v_cache"), caches_after, ref_caches, strict=True):
        assert_bitwise(name, got, wanted)
    _assert_array("o", o, ref_o.shape, q.dtype)
    _assert_array("lse", lse, ref_lse.shape, lse_dtype(q.dtype))
    worst_lse = _assert_lse("lse", lse, ref_lse, q.dtype)
    bound = _rounding_bound(ref_o, plain_o, q.dtype, _factor(arguments))
    longest = ref_caches[0].shape[0] * ref_caches[0].shape[1]
    bound += float(ml_dtypes.finfo(lse_dtype(q.dtype)).tiny) * longest * _largest(ref_caches[1])
    return _found(assert_close("o", o, _overflowed(ref_o, q.dtype), bound), worst_lse)


def judge_backward(
    result: Any, d_o: Any, q: Any, k: Any, v: Any, *, d_lse: Any = None, **options: Any
) -> list[Deviation]:
    """Check (dq, dk, dv, dbias, dsink) of attention_backward."""
    ref = attention.attention_backward(d_o, q, k, v, d_lse=d_lse, arithmetic=EXACT, **options)
    plain = attention.attention_backward(
        d_o, q, k, v, d_lse=d_lse, arithmetic=plain_arithmetic(q.dtype), **options
    )
    inputs = {"dq": q, "dk": k, "dv": v, "dbias": options.get("bias"), "dsink": options.get("sink")}
    forward = attention.attention_forward(q, k, v, arithmetic=EXACT, **options)
    cancellation = _cancellation_terms(d_o, q, k, v, ref, forward, options)
    flushed = _flushed_terms(d_o, q, k, v, d_lse, options)
    worst = []
    for name, like in inputs.items():
        got, wanted = getattr(result, name), getattr(ref, name)
        if like is None:
            if got is not None:
                raise Disagreement(f"{name}: got an array, wanted None")
            continue
        if got is None:
            raise Disagreement(f"{name}: got None, wanted an array of shape {like.shape}")
        _assert_array(name, got, like.shape, like.dtype)
        # A gradient has its own input's dtype: what is stored in it can be no better than its ulp.
        coarsest = max((q.dtype, like.dtype), key=lambda dtype: float(ml_dtypes.finfo(dtype).eps))
        bound = _rounding_bound(wanted, getattr(plain, name), coarsest, _factor(options))
        bound += cancellation.get(name, 0.0) + flushed[name]
        worst.append(assert_close(name, got, _overflowed(wanted, like.dtype), bound))
    return _found(*worst)


def _cancellation_terms(d_o, q, k, v, ref, ref_forward, options):
    """What may be left where the true gradient cancels to (nearly) nothing.

    Two things leave it: accumulation, and the rounding of the o that backward reads its delta from.
    y has the second one too, but in a tensor of a few elements the two need not be alike.
    """
    ref_o, ref_lse = ref_forward
    dim_v = v.shape[-1]
    eps = float(ml_dtypes.finfo(q.dtype).eps)
    accumulate_eps = 2.0**-52 if q.dtype == FLOAT64 else 2.0**-23
    scale = options.get("scale")
    scale = abs(scale) if scale is not None else max(q.shape[-1], 1) ** -0.5
    left_of_ds = accumulate_eps * _largest(v) + 0.5 * eps * _largest(ref_o)
    left_of_ds *= dim_v**0.5 * _largest(d_o)
    terms = {"dq": left_of_ds * scale * _largest(k), "dk": left_of_ds * scale * _largest(q)}
    rows = q.size // max(q.shape[-1] * q.shape[-2], 1)
    if ref.dsink is not None:
        # Each row's share is weighed with its probability of the sink.
        sink = options["sink"].astype(np.float64)[:, None]
        with np.errstate(invalid="ignore", over="ignore"):
            p_sink = np.where(np.isfinite(ref_lse), np.exp(sink - ref_lse), 0)
        weight = (p_sink**2).sum(axis=(*range(ref_lse.ndim - 2), -1)) ** 0.5
        terms["dsink"] = 0.25 * eps * (rows * dim_v) ** 0.5 + left_of_ds * _largest(weight)
    if ref.dbias is not None:
        pairs = rows * q.shape[-2] * k.shape[-3]
        summed = max(pairs // max(ref.dbias.size, 1), 1)
        terms["dbias"] = 0.25 * eps * (summed * dim_v) ** 0.5 + left_of_ds * summed**0.5
    return terms


def _flushed_terms(d_o, q, k, v, d_lse, options):
    """What weights below the smallest normal number of the arithmetic add, as they may be 0."""
    weight = float(ml_dtypes.finfo(lse_dtype(q.dtype)).tiny)
    scale = options.get("scale")
    scale = abs(scale) if scale is not None else max(q.shape[-1], 1) ** -0.5
    of_score = weight * 2 * v.shape[-1] * _largest(d_o) * _largest(v)
    if d_lse is not None:
        of_score += weight * _largest(d_lse)
    rows, keys = q.size // max(q.shape[-1], 1), k.shape[-3]
    return {
        "dq": keys * of_score * scale * _largest(k),
        "dk": rows * of_score * scale * _largest(q),
        "dv": rows * weight * _largest(d_o),
        "dbias": rows * keys * of_score,
        "dsink": rows * of_score,
    }


def assert_same_value(name, result, other):
    """Two results of the library that are one number in exact arithmetic."""
    largest = _largest(other)
    dtype = np.asarray(result).dtype
    if dtype == FLOAT64:
        bound = 1e-11 * largest
    elif dtype == FLOAT32:
        bound = 2e-5 * largest
    else:
        bound = 3 * _ulp(largest, dtype)
    assert_close(name, result, other, bound)


def assert_derivative(name, gradient, differences):
    """A gradient in fp64 against central differences of an fp64 forward, step DIFFERENCE_STEP."""
    assert_close(name, gradient, differences, 1e-7 * max(1.0, _largest(differences)))


# Truncation (step^2) and cancellation (2^-52 / step) errors are both near 1e-10 here.
DIFFERENCE_STEP = 1e-5


def judge_merge(result: Any, o1: Any, lse1: Any, o2: Any, lse2: Any) -> list[Deviation]:
    """Check (o, lse) of merge."""
    o, lse = result
    ref_o, ref_lse = attention.merge(o1, lse1, o2, lse2, arithmetic=EXACT)
    plain_o, _ = attention.merge(o1, lse1, o2, lse2, arithmetic=plain_arithmetic(o1.dtype))
    _assert_array("o", o, ref_o.shape, o1.dtype)
    _assert_array("lse", lse, ref_lse.shape, lse_dtype(o1.dtype))
    worst_lse = _assert_lse("lse", lse, ref_lse, o1.dtype)
    bound = _rounding_bound(ref_o, plain_o, o1.dtype, 2)
    return _found(assert_close("o", o, ref_o, bound), worst_lse)


def assert_bitwise(name, result, wanted):
    """The same shape, dtype and bytes."""
    result, wanted = np.ascontiguousarray(result), np.ascontiguousarray(wanted)
    _assert_array(name, result, wanted.shape, wanted.dtype)
    as_bits = np.dtype(f"u{result.dtype.itemsize}")
    different = result.view(as_bits) != wanted.view(as_bits)
    if different.any():
        at = tuple(int(x) for x in np.argwhere(different)[0])
        raise Disagreement(
            f"{name}: bits differ at {at}: got {result[at]}, wanted {wanted[at]}"
            f" ({int(different.sum())} of {different.size} elements)"
        )
