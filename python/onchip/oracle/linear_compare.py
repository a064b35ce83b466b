"""The judge of linear attention: section 5 of docs/semantics.md as code, and the only place that
holds its tolerances."""

import ml_dtypes
import numpy as np

from .compare import Disagreement

# RMS(x - ref) / RMS(ref), by dtype: outputs and states, gradients, gradients of gates.
BOUNDS = {
    np.dtype(ml_dtypes.bfloat16): (0.005, 0.008, 0.02),
    np.dtype(np.float16): (0.0007, 0.001, 0.003),
    np.dtype(np.float32): (1e-5, 1e-5, 1e-4),
    np.dtype(np.float64): (1e-10, 1e-10, 1e-9),
}
OUTPUT, GRADIENT, GATE_GRADIENT = range(3)

# What decides how much is kept, erased or written, by the operators' names.
GATES = frozenset(("log_decay", "beta", "dt", "A", "dt_bias", "i", "f"))


def rms(x):
    x = np.asarray(x, np.float64)
    return float(np.sqrt(np.mean(x * x))) if x.size else 0.0


def kind_of_gradient(tensor):
    return GATE_GRADIENT if tensor in GATES else GRADIENT


def judge(name, got, ref, dtype, kind=OUTPUT, at_least=0.0):
    """`dtype`: of the call's q, which sets the bound. `at_least`: a floor under RMS(ref)."""
    got64, ref64 = np.asarray(got).astype(np.float64), np.asarray(ref, np.float64)
    if got64.shape != ref64.shape:
        raise Disagreement(f"{name}: shape {got64.shape}, wanted {ref64.shape}")
    finite = np.isfinite(ref64)
    if not np.array_equal(np.where(finite, 0, ref64), np.where(finite, 0, got64), equal_nan=True):
        raise Disagreement(f"{name}: numbers that are not finite are not the reference's")
    # Below the smallest normal number no dtype keeps relative errors.
    tiny = float(ml_dtypes.finfo(dtype).tiny)
    at_least = max(at_least, 1e-3 if np.dtype(dtype) == np.float16 else tiny)
    scale = max(rms(ref64[finite]), at_least)
    error = rms(got64[finite] - ref64[finite])
    bound = BOUNDS[np.dtype(dtype)][kind]
    if not error <= bound * scale:
        raise Disagreement(f"{name}: RMS error {error:.3e} of {scale:.3e}, at most {bound:g} of it")
