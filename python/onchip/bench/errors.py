"""How far results are from fp64: of sampled rows, since all rows at 16,384 would take minutes."""

from typing import Any

import numpy as np
import numpy.typing as npt

from onchip.bench import linear
from onchip.bench.cases import AttentionCase, Case, LinearCase
from onchip.bench.inputs import Array, Inputs

Result = dict[str, Any]
F64 = npt.NDArray[np.float64]

_SAMPLED_ROWS = 64
_BLOCK_ROWS = 1024
# Beyond it only the last keys are looked at where the others take too many queries.
_LONG = 16384


def _seen(case: Case, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """[rows, keys]: which keys these queries see."""
    keys = np.arange(case.seqlen)
    if not isinstance(case, AttentionCase) or not case.causal:
        return np.ones((len(rows), case.seqlen), bool)
    seen = keys <= rows[:, None]
    return seen & (keys >= rows[:, None] - case.window_left) if case.window_left >= 0 else seen


def _softmax(case: Case, q: F64, k: F64, rows: npt.NDArray[np.int64]) -> F64:
    """[rows, keys]: the probabilities of these queries."""
    scores = np.where(_seen(case, rows), q[rows] @ k.T / np.sqrt(case.head_dim), -np.inf)
    weights: F64 = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return weights


class _Errors:
    def __init__(self) -> None:
        self.squares = 0.0
        self.count = 0
        self.largest = 0.0
        self.largest_ref = 0.0
        self.rows = 0

    def add(self, got: Array, wanted: F64) -> None:
        difference = got.astype(np.float64) - wanted
        self.squares += float(np.square(difference).sum())
        self.count += difference.size
        # np.maximum keeps a NaN.
        self.largest = float(np.maximum(self.largest, np.abs(difference).max()))
        self.largest_ref = max(self.largest_ref, float(np.abs(wanted).max()))
        self.rows += wanted.size // wanted.shape[-1]

    def result(self) -> Result:
        return {
            "vs": "fp64",
            "max": self.largest,
            "rms": float(np.sqrt(self.squares / self.count)),
            "max_ref": self.largest_ref,
            "rows": self.rows,
        }


def _sampled(seqlen: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """The first, the last and random other rows."""
    inner = rng.choice(seqlen, min(_SAMPLED_ROWS, seqlen), replace=False)
    return np.unique(np.concatenate(([0, seqlen - 1], inner)))


def _head(x: Array, sequence: int, head: int) -> F64:
    wide: F64 = x[sequence, :, head].astype(np.float64)
    return wide


def _forward(case: Case, inputs: Inputs, o: Array, errors: _Errors, seed: int) -> None:
    rows = _sampled(case.shape[1], np.random.default_rng(seed))
    group = case.num_heads // case.num_heads_kv
    for sequence in range(case.batch):
        for head in range(case.num_heads):
            q = _head(inputs.q, sequence, head)
            k, v = (_head(x, sequence, head // group) for x in (inputs.k, inputs.v))
            errors.add(o[sequence, rows, head], _softmax(case, q, k, rows) @ v)


def _backward(
    case: AttentionCase, inputs: Inputs, made: dict[str, Array], errors: _Errors, seed: int
) -> None:
    """Rows of dq and of dk, dv, of the first key head of the first sequence: each of the latter
    takes every query that sees it."""
    rng = np.random.default_rng(seed)
    rows = _sampled(case.seqlen, rng)
    keys = rows
    if case.causal and case.seqlen > _LONG:
        keys = case.seqlen - _BLOCK_ROWS + _sampled(_BLOCK_ROWS, rng)
    k, v = _head(inputs.k, 0, 0), _head(inputs.v, 0, 0)
    dk, dv = np.zeros((len(keys), case.head_dim)), np.zeros((len(keys), case.head_dim))
    scale = case.head_dim**-0.5
    for head in range(case.num_heads // case.num_heads_kv):
        q, d_o = _head(inputs.q, 0, head), _head(inputs.d_o, 0, head)

        def p_and_ds(block: npt.NDArray[np.int64], q: F64 = q, d_o: F64 = d_o) -> tuple[F64, F64]:
            p = _softmax(case, q, k, block)
            dp = d_o[block] @ v.T
            return p, p * (dp - (p * dp).sum(axis=1, keepdims=True))

        _, ds = p_and_ds(rows)
        errors.add(made["dq"][0, rows, head], scale * (ds @ k))
        for first in range(int(keys[0]) if case.causal else 0, case.seqlen, _BLOCK_ROWS):
            block = np.arange(first, min(first + _BLOCK_ROWS, case.seqlen))
            p, ds = p_and_ds(block)
            dv += p[:, keys].T @ d_o[block]
            dk += scale * (ds[:, keys].T @ q[block])
    errors.add(made["dk"][0, keys, 0], dk)
    errors.add(made["dv"][0, keys, 0], dv)


def error_against_fp64(case: Case, inputs: Inputs, made: dict[str, Array], seed: int) -> Result:
    """Of o, or of dq, dk and dv together; of linear attention, which onchip's own reference knows,
    of all rows of the first key head."""
    errors = _Errors()
    if isinstance(case, LinearCase):
        for name, wanted in linear.exact(case, inputs).items():
            errors.add(made[name][:1, :, : wanted.shape[2]], wanted)
    elif isinstance(case, AttentionCase) and "dq" in made:
        _backward(case, inputs, made, errors, seed)
    else:
        _forward(case, inputs, made["o"], errors, seed)
    return errors.result()
