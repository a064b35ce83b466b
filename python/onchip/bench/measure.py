"""Cases on implementations: time, peak extra memory, error.

`measure_together` measures all of them in one process, in random order, round after round: what
disturbs the machine disturbs all alike. `python -m onchip.bench.measure <case> <implementation>`
measures one in a process of its own, and prints the result as one line of JSON: memory kept from
another measurement is then not used unseen, and one that runs out of memory takes nothing else with
it.
"""

import json
import math
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from onchip.bench import cases, memory
from onchip.bench.cases import Case, StepCase
from onchip.bench.errors import error_against_fp64
from onchip.bench.implementations import IMPLEMENTATIONS, absent
from onchip.bench.inputs import Inputs, draw_inputs
from onchip.bench.prepared import Prepared, Skipped

__all__ = ["Result", "Skipped", "measure", "measure_in_own_process", "measure_together"]

Result = dict[str, Any]
# done, of all, and a word on what comes next
Show = Callable[[float, str], None]

MIN_ROUNDS = 5
_MAX_SAMPLES = 15
_WARM_UP_SEQLEN = 256
_READING_TURNS = 4
# Less stays in a processor's caches from the reading to the step: a share of neither.
_SMALLEST_READING = 64 << 20
# PyTorch's threads spin for a while after their work.
_PAUSE_S = 0.005


@dataclass
class _Job:
    case: Case
    name: str
    prepared: Prepared
    peak_bytes: int | None
    error: Result
    # Of a decoding step: reads as many bytes as its caches have, in so many seconds.
    read: Callable[[], float] | None = None
    samples_ms: list[float] = field(default_factory=list)
    reading_ms: list[float] = field(default_factory=list)

    def sample(self) -> None:
        # Memory may be shared with other machines, and its speed comes and goes: by turns.
        for _ in range(1 if self.read is None else _READING_TURNS):
            if self.read is not None:
                self.reading_ms.append(1e3 * self.read())
            self._sample()

    def _sample(self) -> None:
        start = time.perf_counter()
        result = self.prepared.call()
        self.prepared.finish()
        self.samples_ms.append(1e3 * (time.perf_counter() - start))
        del result

    def result(self) -> Result:
        ms = statistics.median(self.samples_ms)
        reading = {"reading_ms": self.reading_ms} if self.reading_ms else {}
        return reading | {
            "case": self.case.name,
            "impl": self.name,
            "backend": self.prepared.backend,
            "kernel": self.prepared.kernel,
            "ms": ms,
            "samples_ms": self.samples_ms,
            "tflops": self.case.flops / ms / 1e9,
            "gbps": self.case.tensor_bytes / ms / 1e6,
            "peak_bytes": self.peak_bytes,
            "error": self.error,
        }


def shares(result: Result, peaks: dict[str, float]) -> Result:
    """The share of what the CPU reaches at best (`_native.measure_peaks`), by the best sample, as
    the peaks are: `pipe_use`; of a decoding step `bandwidth_use`, the median of the shares of
    reading its caches just before, 64 MiB at least."""
    # The reference computes in fp64, whatever the dtype.
    if result["backend"] == "reference" or result["backend"].startswith("cuda"):
        return {}
    case = cases.parse(result["case"])
    if isinstance(case, StepCase):
        if case.tensor_bytes < _SMALLEST_READING:
            return {}
        turns = zip(result["reading_ms"], result["samples_ms"], strict=True)
        return {"bandwidth_use": statistics.median(read / step for read, step in turns)}
    best_s = min(result["samples_ms"]) / 1e3
    peak = peak_tflops(case.dtype, peaks)
    return {"pipe_use": case.flops / best_s / 1e12 / peak} if peak else {}


def peak_tflops(dtype: str, peaks: dict[str, float]) -> float | None:
    """The highest peak that arithmetic on this dtype can reach; fp16 is computed in fp32."""
    dot = [value for name, value in peaks.items() if name.startswith(f"dot_{dtype}_")]
    fma = [value for name, value in peaks.items() if name.startswith("fma_fp32_")]
    if dtype == "fp64":
        return max(fma) / 2 if fma else None
    return max(dot or fma, default=None)


def _require(case: Case, name: str, seed: int, limit_s: float | None) -> None:
    """Raises Skipped where the measurement cannot be made, or a call would take longer than
    `limit_s`. Warms up the code."""
    reason = absent(name)
    if reason is not None:
        raise Skipped(reason)
    implementation = IMPLEMENTATIONS[name]
    available, needed = memory.available_bytes(), implementation.needed_bytes(case)
    if needed > available:
        raise Skipped(
            f"needs {needed / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB are free"
        )
    small = case.small(_WARM_UP_SEQLEN)
    warm = implementation.prepare(small, draw_inputs(small, seed))
    warm.call()
    warm.finish()
    start = time.perf_counter()
    warm.call()
    warm.finish()
    expected_s = (time.perf_counter() - start) * case.flops / small.flops
    if limit_s is not None and expected_s > limit_s:
        raise Skipped(f"a call would take about {expected_s:.0f} s, more than {limit_s:g} s")


def _prepare(case: Case, name: str, inputs: Inputs, seed: int) -> _Job:
    """With the first call made."""
    prepared = IMPLEMENTATIONS[name].prepare(case, inputs)
    made: list[Any] = []
    peak_bytes = None
    if prepared.in_host_memory:
        peak_bytes = memory.peak_extra_bytes(
            lambda: made.append(prepared.call()), prepared.result_bytes
        )
    else:
        made.append(prepared.call())
    error = error_against_fp64(case, inputs, prepared.outputs(made.pop()), seed)
    read = _reader(inputs) if isinstance(case, StepCase) and prepared.in_host_memory else None
    if not math.isfinite(error["max"]):
        raise ArithmeticError(f"{case.name}: {name}: results are not finite")
    return _Job(case, name, prepared, peak_bytes, error, read)


def _reader(inputs: Inputs) -> Callable[[], float]:
    import onchip
    from onchip import _native

    # Bytes: not every dtype has a buffer.
    caches = [x.reshape(-1).view("uint8") for x in (inputs.k, inputs.v)]
    return lambda: sum(_native.time_reading(x, onchip.get_num_threads()) for x in caches)


def set_threads(num_threads: int) -> None:
    """Of onchip, and as many of PyTorch if it is here; 0: the start value of onchip."""
    import onchip

    onchip.set_num_threads(num_threads)
    if IMPLEMENTATIONS["torch:sdpa"].installed:
        import torch

        torch.set_num_threads(onchip.get_num_threads())


def measure_together(
    wanted: Sequence[tuple[Case, Sequence[str]]],
    *,
    rounds: int = MIN_ROUNDS,
    seed: int = 0,
    limit_s: float | None = None,
    show: Show = lambda done, note: None,
) -> tuple[list[Result], list[Result]]:
    """Results, and what was skipped and why: of each case on each of its implementations."""
    if rounds < MIN_ROUNDS:
        raise ValueError(f"rounds: got {rounds}, wanted {MIN_ROUNDS} at least")
    jobs: list[_Job] = []
    skipped: list[Result] = []
    pairs = sum(len(names) for _, names in wanted)
    steps, done = pairs * (1 + rounds), 0
    for case, names in wanted:
        inputs = None
        for name in names:
            show(done / steps, f"preparing {case.name}, {name}")
            done += 1
            try:
                _require(case, name, seed, limit_s)
                inputs = inputs or draw_inputs(case, seed)
                jobs.append(_prepare(case, name, inputs, seed))
            except (Skipped, MemoryError) as reason:
                text = str(reason) if isinstance(reason, Skipped) else f"out of memory: {reason}"
                skipped.append({"case": case.name, "impl": name, "reason": text})
    order = random.Random(seed)
    shuffled = list(jobs)
    steps = pairs + len(jobs) * rounds
    for number in range(rounds):
        order.shuffle(shuffled)
        for job in shuffled:
            show(done / steps, f"round {number + 1} of {rounds}, {job.case.name}, {job.name}")
            done += 1
            time.sleep(_PAUSE_S)
            job.sample()
    return [job.result() for job in jobs], skipped


def measure(case: Case, name: str, budget_s: float, seed: int) -> Result:
    """One case on one implementation; as many samples as `budget_s` has room for."""
    _require(case, name, seed, None)
    job = _prepare(case, name, draw_inputs(case, seed), seed)
    while not job.samples_ms or (
        len(job.samples_ms) < _MAX_SAMPLES and sum(job.samples_ms) < 1e3 * budget_s
    ):
        job.sample()
    return job.result()


def measure_in_own_process(case: Case, name: str, budget_s: float) -> Result:
    """Raises Skipped where there is no result, with the reason; RuntimeError if the child fails."""
    command = [sys.executable, "-m", "onchip.bench.measure", case.name, name]
    child = subprocess.run(
        [*command, "--budget", str(budget_s)], capture_output=True, text=True, check=False
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
    parser.add_argument("case", type=cases.parse)
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
