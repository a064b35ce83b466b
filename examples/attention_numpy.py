"""Exact attention on NumPy arrays: forward, backward, packed sequences, and which backend ran.

python examples/attention_numpy.py
"""

from itertools import pairwise

import numpy as np

import onchip


def plain_attention(q, k, v, causal):
    """The formula in double precision, with all scores in memory; q, k, v: [rows, heads, dim]."""
    scores = np.einsum("ihd,jhd->hij", q, k, dtype=np.float64) / np.sqrt(q.shape[-1])
    if causal:
        i, j = np.indices(scores.shape[1:])
        scores[:, j > i + len(k) - len(q)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", weights, v)


def main():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731

    # A dense batch: [batch, seqlen, heads, head_dim].
    q, k, v = draw(2, 300, 8, 64), draw(2, 300, 8, 64), draw(2, 300, 8, 64)
    o, lse = onchip.ops.attention_forward(q, k, v, causal=True)
    error = max(np.abs(o[b] - plain_attention(q[b], k[b], v[b], True)).max() for b in range(2))
    print(f"dense:  o {o.shape}, lse {lse.shape}, largest error {error:.1e}")

    # Gradients of sum(o * d_o).
    d_o = draw(*o.shape)
    gradients = onchip.ops.attention_backward(d_o, q, k, v, o, lse, causal=True)
    # The softmax does not change if all keys of a head move by one vector, so dk sums to zero.
    print(f"backward: sum of dk over keys {np.abs(gradients.dk.sum(axis=1)).max():.1e}")

    # Sequences of any length, packed one after another: [total, heads, head_dim]. Query heads share
    # key and value heads in groups of four.
    starts = [0, 17, 17, 300]  # the second sequence is empty
    q, k, v = draw(300, 8, 64), draw(300, 2, 64), draw(300, 2, 64)
    o, lse = onchip.ops.attention_forward(q, k, v, cu_seqlens_q=starts, causal=True)
    packed_error = 0.0
    for begin, end in pairwise(starts):
        if begin < end:
            part = slice(begin, end)
            wanted = plain_attention(q[part], k[part].repeat(4, 1), v[part].repeat(4, 1), True)
            packed_error = max(packed_error, np.abs(o[part] - wanted).max())
    print(f"packed: o {o.shape}, lse {lse.shape}, largest error {packed_error:.1e}")

    print(onchip.explain("attention_forward", q, k, v, cu_seqlens_q=starts, causal=True), end="")
    assert error < 1e-5 and packed_error < 1e-5


if __name__ == "__main__":
    main()
