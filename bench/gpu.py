"""Attention forward on a GPU beside its peers: time, memory, error; and the host's share of a call.

`python -m bench.gpu time` measures every implementation of every case in one process, interleaved
in random order, several rounds, the L2 cache flushed, by CUDA events; `python -m bench.gpu host`
the time that the host needs for a call; `python -m bench.gpu first_call` the first call of a
process, its kernel compiled or from an archive. Each prints its results as one line of JSON.
"""

import argparse
import json
import os
import random
import shutil
import site
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onchip.bench.cases import AttentionCase
from onchip.bench.prepared import chosen
from onchip.bench.record import gpu_facts

Result = dict[str, Any]

CASES = [
    AttentionCase.parse(f"attention/fwd/bf16/d{dim}/{mask}/s{seqlen}")
    for dim in (64, 128)
    for mask in ("full", "causal")
    for seqlen in (1024, 4096, 16384)
]


class OutlierCase(AttentionCase):
    """Inputs with rare large entries, N(0, 1) + N(0, 10) Bernoulli(0.001): what the error of a
    16-bit attention is judged on (Shah et al. 2024, section 4.3)."""

    @property
    def name(self) -> str:
        return super().name + "/outliers"


OUTLIERS = OutlierCase(**vars(AttentionCase.parse("attention/fwd/fp16/h16d128/full/b4s4096")))

_BACKEND = "cuda.sm90"
_FLUSH_BYTES = 256 << 20
# Device clocks before the first event: the launch is queued by then, however slow the host is.
_SPIN_CLOCKS = 1_000_000
_SAMPLED_ROWS = 64
_HOST_BATCHES = 101
_HOST_CALLS = 100
_FIRST_CALLS = 5


@dataclass
class Job:
    case: AttentionCase
    impl: str
    backend: str
    kernel: str
    call: Callable[[], Any]
    peak_bytes: int | None = None
    error: Result | None = None
    samples_ms: list[float] | None = None


# ---- implementations


def _onchip(case: AttentionCase, q: Any, k: Any, v: Any) -> tuple[str, str, Callable[[], Any]]:
    import onchip
    from onchip.torch import attention

    options: dict[str, Any] = {"causal": case.causal, "backend": _BACKEND}
    arrays = (x.detach() for x in (q, k, v))
    backend, kernel = chosen(onchip.explain("attention_forward", *arrays, **options))
    return backend, kernel, lambda: attention(q, k, v, **options)


def _sdpa(name: str) -> Callable[..., tuple[str, str, Callable[[], Any]]]:
    def prepare(case: AttentionCase, q: Any, k: Any, v: Any) -> tuple[str, str, Callable[[], Any]]:
        from torch.nn.functional import scaled_dot_product_attention

        q, k, v = (x.transpose(1, 2) for x in (q, k, v))

        def call() -> Any:
            return scaled_dot_product_attention(q, k, v, is_causal=case.causal).transpose(1, 2)

        return "torch", f"scaled_dot_product_attention, {name}", call

    return prepare


def _flash_attention_4(
    case: AttentionCase, q: Any, k: Any, v: Any
) -> tuple[str, str, Callable[[], Any]]:
    from flash_attn.cute import flash_attn_func

    def call() -> Any:
        result = flash_attn_func(q, k, v, causal=case.causal)
        return result[0] if isinstance(result, tuple) else result

    return "flash_attn.cute", "flash_attn_func", call


def _plain(case: AttentionCase, q: Any, k: Any, v: Any) -> tuple[str, str, Callable[[], Any]]:
    """The formula with scores and probabilities in memory, in the inputs' dtype."""
    import torch

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def call() -> Any:
        scores = q @ k.transpose(2, 3) * case.head_dim**-0.5
        if case.causal:
            hidden = torch.ones(case.seqlen, case.seqlen, dtype=torch.bool, device="cuda").triu(1)
            scores.masked_fill_(hidden, float("-inf"))
        return (torch.softmax(scores, -1) @ v).transpose(1, 2)

    return "torch", "plain formula", call


_SDPA_BACKENDS = {"torch:cudnn": "CUDNN_ATTENTION", "torch:flash": "FLASH_ATTENTION"}
IMPLEMENTATIONS = {
    f"onchip:{_BACKEND}": _onchip,
    **{impl: _sdpa(name) for impl, name in _SDPA_BACKENDS.items()},
}
PEERS = {"flash-attn-4": _flash_attention_4}
FORMULA = {"torch:plain": _plain}


def _selected(impl: str) -> AbstractContextManager[Any]:
    """What an implementation's calls are made under. Not part of them: it takes PyTorch as much of
    the host's time as a call."""
    if impl not in _SDPA_BACKENDS:
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    selected: AbstractContextManager[Any] = sdpa_kernel(getattr(SDPBackend, _SDPA_BACKENDS[impl]))
    return selected


# ---- measurements


def _error_against_fp64(case: AttentionCase, q: Any, k: Any, v: Any, o: Any) -> Result:
    """Of the first, the last and random other query rows of every head."""
    import torch

    generator = torch.Generator().manual_seed(case.seqlen)
    inner = torch.randperm(case.seqlen, generator=generator)[:_SAMPLED_ROWS]
    rows = torch.cat([inner, torch.tensor([0, case.seqlen - 1])]).unique().cuda()
    hidden = torch.arange(case.seqlen, device="cuda")[None] > rows[:, None]
    squares = largest = largest_error = 0.0
    for sequence in range(case.batch):
        q64 = q[sequence, rows].double().transpose(0, 1)
        k64, v64 = (x[sequence].double().transpose(0, 1) for x in (k, v))
        scores = q64 @ k64.transpose(1, 2) / case.head_dim**0.5
        if case.causal:
            scores.masked_fill_(hidden, float("-inf"))
        wanted = torch.softmax(scores, -1) @ v64
        difference = o[sequence, rows].double().transpose(0, 1) - wanted
        squares += float(difference.square().mean())
        largest_error = max(largest_error, float(difference.abs().max()))
        largest = max(largest, float(wanted.abs().max()))
    return {
        "vs": "fp64",
        "max": largest_error,
        "rms": (squares / case.batch) ** 0.5,
        "max_ref": largest,
        "rows": len(rows) * case.batch * case.num_heads,
    }


def _peak_bytes(call: Callable[[], Any]) -> int:
    """Device memory beyond inputs and results."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before: int = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    result_bytes: int = result.numel() * result.element_size()
    peak: int = torch.cuda.max_memory_allocated() - before - result_bytes
    return max(0, peak)


def ceilings() -> Result:
    """What the device reaches at best, in the same run: cuBLAS and a device-to-device copy."""
    import torch

    def best(call: Callable[[], Any]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        samples: list[float] = []
        for index in range(13):
            torch.cuda._sleep(_SPIN_CLOCKS)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if index >= 3:
                samples.append(begin.elapsed_time(end))
        return statistics.median(samples) / 1e3

    size = 8192
    a, b, product = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    matmul_s = best(lambda: torch.mm(a, b, out=product))
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    copy_s = best(lambda: target.copy_(source))
    return {
        "copy_tbps": 2 * source.nbytes / copy_s / 1e12,
        "matmul_bf16_tflops": 2 * size**3 / matmul_s / 1e12,
    }


def _draw(case: AttentionCase) -> Any:
    import torch

    x = torch.randn(case.shape, device="cuda")
    if isinstance(case, OutlierCase):
        x += (
            10
            * torch.randn(case.shape, device="cuda")
            * (torch.rand(case.shape, device="cuda") < 0.001)
        )
    return x.to({"bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype])


Row = tuple[AttentionCase, dict[str, Any]]


def _prepare_jobs(rows: list[Row], skipped: list[Result]) -> Iterator[Job]:
    for case, implementations in rows:
        q, k, v = (_draw(case) for _ in range(3))
        for impl, prepare in implementations.items():
            try:
                job = Job(case, impl, *prepare(case, q, k, v))
                with _selected(impl):
                    o = job.call()  # compiles, autotunes
                    job.error = _error_against_fp64(case, q, k, v, o)
                    del o
                    job.peak_bytes = _peak_bytes(job.call)
            except Exception as error:
                # A peer that does not run here must not take the others' figures with it.
                if impl.startswith("onchip"):
                    raise
                reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                skipped.append({"case": case.name, "impl": impl, "reason": reason})
                continue
            yield job


def measure_time(rows: list[Row], rounds: int) -> Result:
    """`rows`: cases, each with what is to compute it."""
    import torch

    skipped: list[Result] = []
    with torch.no_grad():
        jobs = list(_prepare_jobs(rows, skipped))
        prepared = list(jobs)
        flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        reached = ceilings()
        order = random.Random(0)
        for _ in range(rounds):
            order.shuffle(jobs)
            for job in jobs:
                with _selected(job.impl):
                    flush.zero_()
                    torch.cuda._sleep(_SPIN_CLOCKS)
                    begin.record()
                    job.call()
                    end.record()
                    torch.cuda.synchronize()
                job.samples_ms = [*(job.samples_ms or []), begin.elapsed_time(end)]
    results = [_result(job) for job in prepared]
    return {"results": results, "skipped": skipped, "ceilings": reached}


def _result(job: Job) -> Result:
    assert job.samples_ms is not None
    ms = statistics.median(job.samples_ms)
    return {
        "case": job.case.name,
        "impl": job.impl,
        "backend": job.backend,
        "kernel": job.kernel,
        "ms": ms,
        "samples_ms": job.samples_ms,
        "tflops": job.case.flops / ms / 1e9,
        "gbps": job.case.tensor_bytes / ms / 1e6,
        "peak_bytes": job.peak_bytes,
        "error": job.error,
    }


def _host_result(layer: str, impl: str, kernel: str, samples_us: list[float]) -> Result:
    samples_ms = [us / 1e3 for us in samples_us]
    return {
        "case": f"host/{layer}/attention_forward",
        "impl": impl,
        "backend": _BACKEND if impl.startswith("onchip") else "torch",
        "kernel": kernel,
        "ms": statistics.median(samples_ms),
        "samples_ms": samples_ms,
        "host_us": statistics.median(samples_us),
    }


def measure_host(program: Path) -> Result:
    """Of calls so small that the device waits for the host. `program` measures the C ABI."""
    import torch

    case = AttentionCase.parse("attention/fwd/bf16/h2d128/causal/b1s128")
    results = []
    answer = json.loads(subprocess.run([program], capture_output=True, check=True).stdout)
    impl = f"onchip:{_BACKEND}"
    results.append(_host_result("c++", impl, answer["kernel"], answer["plan_and_run_us"]))
    run_alone = _host_result("c++", f"{impl}, planned once", answer["kernel"], answer["run_us"])
    results.append(run_alone)
    # Interleaved, in short batches: the machine's other work slows down whoever has the turn.
    jobs = []
    for layer, with_grad in (("torch", False), ("torch_with_grad", True)):
        q, k, v = (
            torch.randn(case.shape, device="cuda", dtype=torch.bfloat16, requires_grad=with_grad)
            for _ in range(3)
        )
        for name, prepare in IMPLEMENTATIONS.items():
            _, kernel, call = prepare(case, q, k, v)
            jobs.append((with_grad, call, (layer, name, kernel), list[float]()))
    for _ in range(_HOST_BATCHES + 1):
        for with_grad, call, (_, name, _), samples in random.sample(jobs, len(jobs)):
            with torch.set_grad_enabled(with_grad), _selected(name):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(_HOST_CALLS):
                    call()
                samples.append(1e6 * (time.perf_counter() - start) / _HOST_CALLS)
    results += [_host_result(*names, samples[1:]) for *_, names, samples in jobs]
    return {"results": results, "skipped": []}


_FIRST_CALL = """
import time, torch
q = torch.randn(1, 1024, 16, 128, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
import onchip.torch
start = time.perf_counter()
with torch.no_grad():
    onchip.torch.attention(q, q, q, causal=True, backend="cuda.sm90")
torch.cuda.synchronize()
print(1e3 * (time.perf_counter() - start))
"""


def measure_first_call(archive: Path) -> Result:
    """With CUDA started and PyTorch loaded; nothing on disk but the archive."""
    import onchip

    package = Path(onchip.__file__).parent
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for source in ("nvrtc", "archive"):
            copy = Path(folder) / source
            ignored = shutil.ignore_patterns("onchip_kernels.bin", "__pycache__")
            shutil.copytree(package, copy / "onchip", ignore=ignored)
            if source == "archive":
                shutil.copy(archive, copy / "onchip" / "onchip_kernels.bin")
            path = os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH")])])
            environment = os.environ | {"PYTHONPATH": path, "ONCHIP_CACHE_DIR": "off"}
            samples_ms = []
            for _ in range(_FIRST_CALLS):
                child = subprocess.run(
                    [sys.executable, "-c", _FIRST_CALL],
                    env=environment,
                    cwd=folder,
                    capture_output=True,
                    text=True,
                    check=False,
                )
                if child.returncode != 0:
                    raise RuntimeError(f"first call ({source}): {child.stderr.strip()}")
                samples_ms.append(float(child.stdout))
            results.append(
                {
                    "case": f"first_call/{source}/attention_forward",
                    "impl": f"onchip:{_BACKEND}",
                    "backend": _BACKEND,
                    "kernel": "attention_forward",
                    "ms": statistics.median(samples_ms),
                    "samples_ms": samples_ms,
                }
            )
    return {"results": results, "skipped": []}


def add_pipe_use(results: list[Result], pipe_use: dict[str, float]) -> None:
    """By case, of onchip's kernel: measured apart, on the same kernel launched by itself."""
    for result in results:
        if result["impl"].startswith("onchip") and result["case"] in pipe_use:
            result["pipe_use"] = pipe_use[result["case"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("time", "host", "first_call"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peers", type=Path, help="a folder of packages: FlashAttention-4")
    parser.add_argument("--program", type=Path, help="host: bench/host_time.cpp, compiled")
    parser.add_argument("--archive", type=Path, help="first_call: what `onchip kernels build` made")
    arguments = parser.parse_args()
    if arguments.what == "time":
        implementations = dict(IMPLEMENTATIONS)
        if arguments.peers is not None:
            site.addsitedir(str(arguments.peers))
            implementations |= PEERS
        rows: list[Row] = [(case, implementations) for case in CASES]
        rows.append((OUTLIERS, implementations | FORMULA))
        answer = measure_time(rows, arguments.rounds)
        answer["gpu"] = gpu_facts()  # just after: the clocks under load
    elif arguments.what == "host":
        answer = measure_host(arguments.program)
    else:
        answer = measure_first_call(arguments.archive)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
