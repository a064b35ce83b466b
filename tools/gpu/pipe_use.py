#!/usr/bin/env python3
"""Share of the tensor pipe that the sm90 attention forward uses, of its longest block's cycles.

Prints one line of JSON: {case: share}; with --unsplit last waves are left whole. Needs a Hopper GPU
and torch; cycles do not depend on the clock, so the figure holds where power limits it."""

import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import attention_plan  # noqa: E402
import attention_runner  # noqa: E402
import torch  # noqa: E402

from bench.gpu import CASES  # noqa: E402

RUNS = 7
FLOP_PER_CLOCK = 4096  # bf16 and fp16, of one multiprocessor


def measure(case, batch_invariant):
    q, k, v = (torch.randn(case.shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    o = torch.empty_like(q)
    cycles = torch.zeros(1, dtype=torch.int64, device="cuda")
    spec = attention_plan.select(True, case.head_dim, case.head_dim, case.causal, False)
    call = attention_runner.Attention(
        q,
        k,
        v,
        o,
        spec=spec,
        causal=case.causal,
        batch_invariant=batch_invariant,
        longest_block=cycles,
    )
    counts = []
    for _ in range(RUNS):
        cycles.zero_()
        call.launch()
        counts.append(int(cycles))
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    return case.flops / (FLOP_PER_CLOCK * multiprocessors * statistics.median(counts))


unsplit = "--unsplit" in sys.argv[1:]
print(json.dumps({case.name: measure(case, unsplit) for case in CASES}))
