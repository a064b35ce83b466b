"""The judge of linear attention: section 5 of docs/semantics.md as code, and the only place that
holds its tolerances."""

from typing import Any

import ml_dtypes
import numpy as np

from . import linear
from .compare import Deviation, Disagreement

# RMS(x - ref) / RMS(ref), by dtype: outputs and states, gradients, gradients of gates.
BOUNDS = {
    np.dtype(ml_dtypes.bfloat16): (0.005, 0.008, 0.02),
    np.dtype(np.float16): (0.0007, 0.001, 0.003),
    np.dtype(np.float32): (1e-5, 1e-5, 1e-4),
    np.dtype(np.float64): (1e-10, 1e-10, 1e-9),
}
OUTPUT, GRADIENT, GATE_GRADIENT = range(3)

# What decides how much is kept, erased or written, by the operators' names.
GATES = frozenset(
    ("log_decay", "beta", "dt", "A", "A_log", "dt_bias", "i", "f", "delta", "delta_bias")
)


def rms(x):
    x = np.asarray(x, np.float64)
    return float(np.sqrt(np.mean(x * x))) if x.size else 0.0


def kind_of_gradient(tensor):
    return GATE_GRADIENT if tensor in GATES else GRADIENT


def parts_of(state: Any) -> tuple[Any, ...]:
    """The parts of a state: of one, of several, of none."""
    if state is None:
        return ()
    return state if isinstance(state, tuple) else (state,)


def judge(
    name: Any, got: Any, ref: Any, dtype: Any, kind: int = OUTPUT, at_least: float = 0.0
) -> Deviation | None:
    """`dtype`: of the call's q, which sets the bound. `at_least`: a floor under RMS(ref).

    Returns the worst element, with the RMS error and its bound; None of an empty array."""
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
    difference = np.where(finite, got64, 0) - np.where(finite, ref64, 0)
    error = rms(difference[finite])
    bound = BOUNDS[np.dtype(dtype)][kind]
    if not difference.size:
        return None
    at = tuple(int(x) for x in np.unravel_index(np.argmax(np.abs(difference)), difference.shape))
    worst = Deviation(
        *(name, at, float(got64[at]), float(ref64[at])),
        *(error, bound * scale, error / (bound * scale)),
    )
    if not error <= bound * scale:
        raise Disagreement(
            f"{name}: RMS error {error:.3e} of {scale:.3e}, at most {bound:g} of it; worst at {at}:"
            f" got {worst.got:.9g}, wanted {worst.wanted:.9g}"
        )
    return worst


def values_of(tensors: Any) -> Any:
    """What is written, whose dtype the output has."""
    return next(tensors[name] for name in ("x", "v", "u") if name in tensors)


def output_shape(tensors: Any) -> tuple[int, ...]:
    """A row a token, with the heads and width of the values."""
    values = values_of(tensors)
    tokens = next((tensors[name] for name in ("q", "r") if name in tensors), values)
    return (*tokens.shape[:-2], *values.shape[-2:])


def judge_forward(
    op: str, result: Any, tensors: Any, *, initial_state: Any = None, **options: Any
) -> list[Deviation]:
    """Check (o, final state) of <op>_forward against the plain loop over tokens."""
    o, final = result
    like = values_of(tensors)
    shape = output_shape(tensors)
    if o.shape != shape or o.dtype != like.dtype:
        raise Disagreement(f"o: {o.dtype} {o.shape}, wanted {like.dtype} {shape}")
    ref_o, ref_final = linear.run(op, tensors, initial_state=initial_state, **options)
    found = [judge("o", o, ref_o, like.dtype)]
    state_dtype = np.float64 if like.dtype == np.float64 else np.float32
    for n, (got, want) in enumerate(zip(parts_of(final), parts_of(ref_final), strict=True)):
        if got.dtype != state_dtype:
            raise Disagreement(f"final_state[{n}]: {got.dtype}, wanted {np.dtype(state_dtype)}")
        found.append(judge(f"final_state[{n}]", got, want, like.dtype))
    return [deviation for deviation in found if deviation is not None]


def _with_time(op: str, name: str, x: Any) -> Any:
    """A step's tensor as forward's of one token: [batch, ..] as [batch, 1, ..]."""
    has_rows = op == "gated_delta_product" and name in ("k", "v", "beta")
    return x[:, None] if linear.is_row(op, name, x) and not has_rows else x


def judge_step(
    op: str, result: Any, tensors: Any, *, state: Any, state_indices: Any = None, **options: Any
) -> list[Deviation]:
    """Check (o, parts of the pool as the call left it) of <op>_step, given the pool before it,
    against the plain loop over tokens: rows and slots that are left out included."""
    o, *pool = result
    like = values_of(tensors)
    batch = len(like)
    indices = np.arange(batch) if state_indices is None else np.asarray(state_indices)
    rows = np.flatnonzero(indices >= 0)
    slots = indices[rows]
    if np.asarray(np.delete(o, rows, axis=0)).any():
        raise Disagreement("o: a row that was skipped is not 0")
    for n, (part, before) in enumerate(zip(pool, parts_of(state), strict=True)):
        rest = (np.delete(x, slots, axis=0).tobytes() for x in (part, before))
        if len(set(rest)) > 1:
            raise Disagreement(f"state[{n}]: a slot of no row was written")
    if not len(rows):
        return []
    given = {
        name: _with_time(op, name, x)[rows] if linear.is_row(op, name, x) else x
        for name, x in tensors.items()
    }
    initial = tuple(part[slots] for part in parts_of(state))
    ref_o, ref_state = linear.run(op, given, initial_state=initial, **options)
    found = [judge("o", o[rows], ref_o[:, 0], like.dtype)]
    for n, (part, want) in enumerate(zip(pool, ref_state, strict=True)):
        # A pool is rounded to its own dtype, once.
        dtype = max(like.dtype, part.dtype, key=lambda d: BOUNDS[np.dtype(d)][OUTPUT])
        found.append(judge(f"state[{n}]", part[slots], want, dtype))
    return [deviation for deviation in found if deviation is not None]


def judge_gradients(got: Any, ref: Any, tensors: Any, dtype: Any) -> list[Deviation]:
    """Check the gradients of a linear operator against those in float64 of the reference."""
    floor = 0.0
    for name in ("q", "C", "r"):
        if name in tensors:
            floor = rms(np.asarray(tensors[name], np.float64) * getattr(ref, "d" + name))
    found = []
    for field in got._fields:
        ours, theirs = getattr(got, field), getattr(ref, field)
        name = field.removeprefix("d")
        if theirs is None:
            if ours is not None:
                raise Disagreement(f"{field}: got an array, wanted None")
        elif name == "initial_state":
            for part, other in zip(parts_of(ours), parts_of(theirs), strict=True):
                found.append(judge(field, part, other, dtype, GRADIENT))
        else:
            like = tensors[name]
            if ours.dtype != like.dtype or ours.shape != like.shape:
                raise Disagreement(
                    f"{field}: {ours.dtype} {ours.shape}, wanted {like.dtype} {like.shape}"
                )
            kind = kind_of_gradient(name)
            at_least = floor if kind == GATE_GRADIENT else 0.0
            found.append(judge(field, ours, theirs, dtype, kind, at_least))
    return [deviation for deviation in found if deviation is not None]
