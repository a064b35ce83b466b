"""Short causal convolution and the norms as their formulas, in the dtype of the arrays that come
in: float64, or longdouble for differences."""

import itertools
from typing import Any

import numpy as np


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def activate(name: str | None, x: Any) -> Any:
    if name is None:
        return x
    return x * _sigmoid(x) if name == "silu" else _sigmoid(x)


def causal_conv1d(
    x: Any,
    weight: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    seqlens: Any = None,
) -> tuple[Any, Any]:
    """(y, final state): each sequence behind the W inputs of its state, slid over."""
    channels, width = weight.shape
    if cu_seqlens is None:
        spans: list[Any] = [(n, slice(0, x.shape[1])) for n in range(len(x))]
    else:
        spans = [(..., slice(int(a), int(b))) for a, b in itertools.pairwise(cu_seqlens)]
    y = np.zeros_like(x)
    finals = np.zeros((len(spans), channels, width), x.dtype)
    for n, (batch, rows) in enumerate(spans):
        if seqlens is not None:
            rows = slice(rows.start, rows.start + int(seqlens[n]))
        at = rows if batch is ... else (batch, rows)
        before = np.zeros((channels, width), x.dtype) if initial_state is None else initial_state[n]
        inputs = np.concatenate([before, x[at].T], axis=1)
        length = rows.stop - rows.start
        for t in range(length):
            total = (inputs[:, t + 1 : t + 1 + width] * weight).sum(axis=1)
            y[at][t] = activate(activation, total if bias is None else total + bias)
        finals[n] = inputs[:, length:]
    return y, finals


def l2norm(x: Any, *, eps: float = 1e-6) -> Any:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + eps)


def rms_norm_gated(
    x: Any,
    *,
    gate: Any = None,
    weight: Any = None,
    activation: str | None = None,
    gate_first: bool = False,
    group_size: int | None = None,
    eps: float = 1e-6,
) -> Any:
    """Zhang & Sennrich 2019, with a gate behind or before it."""
    factor = 1 if gate is None else activate(activation, gate)
    u = x * factor if gate_first else x
    size = group_size or u.shape[-1]
    groups = u.reshape(*u.shape[:-1], u.shape[-1] // size, size)
    y = (groups / np.sqrt((groups * groups).mean(-1, keepdims=True) + eps)).reshape(u.shape)
    y = y if weight is None else y * weight
    return y if gate_first else y * factor
