"""Attention over keys that several workers hold, without any of them seeing all keys.

Each worker has one shard of the sequence: its queries, keys and values. Key shards travel around
a ring; a worker attends to the one at hand and merges the partial result into what it has. Going
back, each partial backward pass takes the merged o and lse: the denominator over all keys.

Here the workers take turns in one process.

    python examples/ring_attention_merge.py
"""

import numpy as np

import onchip

WORKERS = 4


def ring_forward(shards, worker):
    """o, lse of the worker's queries over every key they may see: causal over all shards."""
    q = shards[worker][0]
    merged = None
    for step in range(WORKERS):
        source = (worker - step) % WORKERS  # whose keys arrive at this step
        if source > worker:
            continue  # all of them lie in the future
        _, k, v = shards[source]
        part = onchip.ops.attention_forward(q, k, v, causal=source == worker)
        merged = part if merged is None else onchip.ops.merge(*merged, *part)
    return merged


def ring_backward(shards, worker, d_o, o, lse):
    """(dq of the worker, {source: (dk, dv)} for the owners of the keys it has seen)."""
    q = shards[worker][0]
    dq = np.zeros_like(q)
    for_owners = {}
    for source in range(worker + 1):
        _, k, v = shards[source]
        part = onchip.ops.attention_backward(d_o, q, k, v, o, lse, causal=source == worker)
        dq += part.dq
        for_owners[source] = (part.dk, part.dv)
    return dq, for_owners


def main():
    rng = np.random.default_rng(0)
    q, k, v, d_o = (rng.standard_normal((1, 1024, 4, 64), dtype=np.float32) for _ in range(4))
    split = [np.split(x, WORKERS, axis=1) for x in (q, k, v)]
    shards = list(zip(*split, strict=True))

    parts = [ring_forward(shards, worker) for worker in range(WORKERS)]
    o = np.concatenate([part[0] for part in parts], axis=1)
    lse = np.concatenate([part[1] for part in parts], axis=2)

    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    rows = np.split(np.arange(q.shape[1]), WORKERS)
    d_o_shards = np.split(d_o, WORKERS, axis=1)
    for worker, (part_o, part_lse) in enumerate(parts):
        part_dq, for_owners = ring_backward(shards, worker, d_o_shards[worker], part_o, part_lse)
        dq[:, rows[worker]] = part_dq
        for owner, (part_dk, part_dv) in for_owners.items():
            dk[:, rows[owner]] += part_dk
            dv[:, rows[owner]] += part_dv

    whole_o, whole_lse = onchip.ops.attention_forward(q, k, v, causal=True)
    whole = onchip.ops.attention_backward(d_o, q, k, v, whole_o, whole_lse, causal=True)
    for name, ring, one in [
        ("o", o, whole_o),
        ("lse", lse, whole_lse),
        ("dq", dq, whole.dq),
        ("dk", dk, whole.dk),
        ("dv", dv, whole.dv),
    ]:
        difference = np.abs(ring - one).max()
        print(f"{name:<4} ring against one call: largest difference {difference:.1e}")
        assert difference < 2e-5 * max(1.0, np.abs(one).max()), name


if __name__ == "__main__":
    main()
