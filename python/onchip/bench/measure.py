"""One case on one implementation, in a process of its own: time, peak extra memory, error.

`python -m onchip.bench.measure <case> <implementation>` prints the result as one line of JSON. A
process of its own, so that memory kept from another measurement is not used unseen, and one that
runs out of memory takes nothing else with it.
"""

import json
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from onchip.bench import memory
from onchip.bench.cases import AttentionCase
from onchip.bench.implementations import IMPLEMENTATIONS, Array

Result = dict[str, Any]

_SAMPLED_ROWS = 64
_MAX_SAMPLES = 15
_WARM_UP_SEQLEN = 128


class Skipped(Exception):
    """The measurement cannot be made here; the text says why."""


def draw_inputs(case: AttentionCase, seed: int) -> tuple[Array, Array, Array]:
    if case.dtype != "fp32":
        raise ValueError(f"dtype: got {case.dtype}, wanted fp32")
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(case.shape, np.float32) for _ in range(3))
    return q, k, v


def error_against_fp64(
    case: AttentionCase, q: Array, k: Array, v: Array, o: Array, seed: int
) -> Result:
    """Of the first, the last and random other query rows: all rows at 16,384 would take minutes."""
    rng = np.random.default_rng(seed)
    count = min(_SAMPLED_ROWS, case.seqlen)
    inner = rng.choice(case.seqlen, count, replace=False)
    rows = np.unique(np.concatenate(([0, case.seqlen - 1], inner)))
    hidden = np.arange(case.seqlen) > rows[:, None]
    differences, largest = [], 0.0
    for sequence in range(case.batch):
        for head in range(case.num_heads):
            q64, k64, v64 = (x[sequence, :, head].astype(np.float64) for x in (q, k, v))
            scores = q64[rows] @ k64.T / np.sqrt(case.head_dim)
            if case.causal:
                scores[hidden] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            wanted = weights @ v64 / weights.sum(axis=1, keepdims=True)
            differences.append(o[sequence, rows, head] - wanted)
            largest = max(largest, float(np.abs(wanted).max()))
    difference: npt.NDArray[np.float64] = np.stack(differences)
    return {
        "vs": "fp64",
        "max": float(np.abs(difference).max()),
        "rms": float(np.sqrt(np.square(difference).mean())),
        "max_ref": largest,
        "rows": len(rows) * case.batch * case.num_heads,
    }


def measure(case: AttentionCase, implementation_name: str, budget_s: float, seed: int) -> Result:
    implementation = IMPLEMENTATIONS[implementation_name]
    if not implementation.installed:
        raise Skipped(f"{implementation.package} is not installed")
    available, needed = memory.available_bytes(), implementation.needed_bytes(case)
    if needed > available:
        raise Skipped(
            f"needs {needed / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB are free"
        )

    small = replace(case, seqlen=min(case.seqlen, _WARM_UP_SEQLEN), batch=1)
    implementation.prepare(small, *draw_inputs(small, seed)).call()

    q, k, v = draw_inputs(case, seed)
    prepared = implementation.prepare(case, q, k, v)
    peak_bytes = memory.peak_extra_bytes(prepared.call, prepared.result_bytes)
    samples_ms: list[float] = []
    result = None
    while len(samples_ms) < _MAX_SAMPLES and sum(samples_ms) < 1e3 * budget_s:
        result = None
        start = time.perf_counter()
        result = prepared.call()
        samples_ms.append(1e3 * (time.perf_counter() - start))
    error = error_against_fp64(case, q, k, v, prepared.output(result), seed)

    ms = statistics.median(samples_ms)
    return {
        "case": case.name,
        "impl": implementation.name,
        "backend": prepared.backend,
        "kernel": prepared.kernel,
        "ms": ms,
        "samples_ms": samples_ms,
        "tflops": case.flops / ms / 1e9,
        "gbps": case.tensor_bytes / ms / 1e6,
        "peak_bytes": peak_bytes,
        "error": error,
    }


def measure_in_own_process(
    case: AttentionCase, implementation_name: str, budget_s: float
) -> Result:
    """Raises Skipped where there is no result, with the reason; RuntimeError if the child fails."""
    command = [sys.executable, "-m", "onchip.bench.measure", case.name, implementation_name]
    child = subprocess.run(
        [*command, "--budget", str(budget_s)],
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode == -signal.SIGKILL:
        raise Skipped("killed, most likely for want of memory")
    if child.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{child.stderr.strip()}")
    answer: Result = json.loads(child.stdout)
    if "skipped" in answer:
        raise Skipped(answer["skipped"])
    return answer


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", type=AttentionCase.parse)
    parser.add_argument("implementation", choices=sorted(IMPLEMENTATIONS))
    parser.add_argument("--budget", type=float, default=4.0, help="seconds to spend on timed calls")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        answer = measure(arguments.case, arguments.implementation, arguments.budget, arguments.seed)
    except Skipped as reason:
        answer = {"skipped": str(reason)}
    except MemoryError as error:
        answer = {"skipped": f"out of memory: {error}"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
