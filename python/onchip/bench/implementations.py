"""What can compute a case: each prepares the inputs in its own layout and gives a call to time."""

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onchip.bench.cases import AttentionCase

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Prepared:
    call: Callable[[], Any]
    # The call's o as `[batch, seqlen, heads, head_dim]`.
    output: Callable[[Any], Array]
    # What the caller gets and would have to hold anyway.
    result_bytes: int
    backend: str
    kernel: str


@dataclass(frozen=True)
class Implementation:
    name: str
    # Import name of the package that has it.
    package: str
    prepare: Callable[[AttentionCase, Array, Array, Array], Prepared]
    # Memory below which the call would only exhaust the machine.
    needed_bytes: Callable[[AttentionCase], int]

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


def plain_attention(q: Array, k: Array, v: Array, causal: bool) -> Array:
    """softmax(q k^T / sqrt(head_dim)) v, one head at a time and in place.

    One score matrix and one mask are alive at a time: the least that the formula takes when it is
    written with matrix products. The sums divide the rows of o, not the scores.
    """
    o = np.empty(q.shape, q.dtype)
    scale = np.float32(q.shape[-1] ** -0.5)
    rows, columns = np.arange(q.shape[1]), np.arange(k.shape[1])
    hidden = np.less.outer(rows, columns) if causal else None
    scores = np.empty((q.shape[1], k.shape[1]), q.dtype)
    for sequence in range(q.shape[0]):
        for head in range(q.shape[2]):
            at = (sequence, slice(None), head)
            np.matmul(q[at] * scale, k[at].T, out=scores)
            if hidden is not None:
                np.copyto(scores, -np.inf, where=hidden)
            scores -= scores.max(axis=1, keepdims=True)
            np.exp(scores, out=scores)
            o[at] = (scores @ v[at]) / scores.sum(axis=1, keepdims=True)
    return o


def _prepare_plain(case: AttentionCase, q: Array, k: Array, v: Array) -> Prepared:
    return Prepared(
        call=lambda: plain_attention(q, k, v, case.causal),
        output=lambda o: o,
        result_bytes=q.nbytes,
        backend="numpy",
        kernel="plain formula, head by head",
    )


def _plain_bytes(case: AttentionCase) -> int:
    scores = 4 * case.seqlen**2
    mask = case.seqlen**2 if case.causal else 0
    return scores + mask + 3 * case.tensor_bytes


def _prepare_onchip(case: AttentionCase, q: Array, k: Array, v: Array) -> Prepared:
    import onchip

    # Forced: a figure of the fast backend must not come from the reference.
    options: dict[str, Any] = {"causal": case.causal, "backend": "cpu"}
    lse_bytes = 4 * case.batch * case.num_heads * case.seqlen
    backend, kernel = chosen(onchip.explain("attention_forward", q, k, v, **options))
    return Prepared(
        call=lambda: onchip.ops.attention_forward(q, k, v, **options),
        output=lambda result: result[0],
        result_bytes=q.nbytes + lse_bytes,
        backend=backend,
        kernel=kernel,
    )


def chosen(explanation: str) -> tuple[str, str]:
    """Backend and kernel from the text of onchip.explain."""
    line = re.search(r"^  (\S+): chosen: (.+), workspace \d+ bytes$", explanation, re.MULTILINE)
    if line is None:
        raise ValueError(f"no backend is chosen in {explanation!r}")
    return line[1], line[2]


def _prepare_torch(case: AttentionCase, q: Array, k: Array, v: Array) -> Prepared:
    import torch

    # Its own layout, [batch, heads, seqlen, head_dim], contiguous.
    tensors = [torch.from_numpy(np.ascontiguousarray(x.transpose(0, 2, 1, 3))) for x in (q, k, v)]
    attention = torch.nn.functional.scaled_dot_product_attention

    def call() -> Any:
        with torch.inference_mode():
            return attention(*tensors, is_causal=case.causal)

    return Prepared(
        call=call,
        output=lambda o: o.numpy().transpose(0, 2, 1, 3),
        result_bytes=q.nbytes,
        backend="cpu",
        kernel="scaled_dot_product_attention",
    )


def _twice_the_tensors(case: AttentionCase) -> int:
    return 2 * case.tensor_bytes


IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        Implementation("numpy:plain", "numpy", _prepare_plain, _plain_bytes),
        Implementation("onchip:cpu", "onchip", _prepare_onchip, _twice_the_tensors),
        Implementation("torch:sdpa", "torch", _prepare_torch, _twice_the_tensors),
    )
}
