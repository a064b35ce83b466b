#!/usr/bin/env python3
"""Checks and times the sm90 attention forward kernel on a machine with a Hopper GPU and torch.

kernel_check.py             every phase below, each in a process of its own with a time limit
kernel_check.py build       compiles every spec the phases use into build/cubins (needs no GPU)
kernel_check.py tile        tests/tile: the primitives
kernel_check.py debug       a few cases with bounded waits: a deadlock names role, barrier, phase
kernel_check.py check       all cases against fp64, outputs and everything outside poisoned
kernel_check.py guard       cases whose tensors begin and end where nothing is mapped
kernel_check.py repeat      1,000 runs, bitwise equal
kernel_check.py small       a few small cases, for compute-sanitizer --kernel-name
                            kernel_substring=attention_forward; not one of "every phase"
kernel_check.py time        beside torch's cuDNN and flash backends, interleaved
Records go to $OUT (or build/).
"""

import argparse
import concurrent.futures
import os
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import attention_plan
from kernel_cases import dense_cases, split_cases, turn_cases, varlen_cases
from kernel_time import phase_time, variants

LIMITS = {"tile": 60, "debug": 90, "check": 240, "guard": 90, "repeat": 90, "time": 170}

# ---- phases


def phase_tile():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/tile"]
    code = subprocess.run(command, cwd=attention_plan.ROOT).returncode
    return 1, ["tests/tile failed"] if code else []


def run_cases(cases, debug):
    """A case that raises is a failure; after an error of the device nothing more can run."""
    import torch

    failures, count = [], 0
    for c in cases:
        torch.manual_seed(count)
        count += 1
        try:
            c.run(failures, debug=debug)
        except Exception:
            failures.append(f"{c.name} d{c.dims} {c.dtype}: {traceback.format_exc(limit=-3)}")
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                break
    return count, failures


def phase_small():
    wanted = ("split few tiles", "257x129", "65x64", "packed mixed", "dense seqlens", "scale -0.1")
    cases = [c for make in (dense_cases, varlen_cases, split_cases) for c in make()]
    return run_cases(
        [c for c in cases if c.dtype == "bf16" and any(w in c.name for w in wanted)], False
    )


def phase_debug():
    some = [c for make in (dense_cases, varlen_cases, split_cases) for c in list(make())[::9]]
    return run_cases([*some, *turn_cases()], True)


def phase_check():
    cases = [c for make in (dense_cases, varlen_cases, turn_cases, split_cases) for c in make()]
    result = run_cases(cases, False)
    print(probe_zero_stride())
    return result


def phase_guard():
    """Above all packed ones: their maps' base addresses lie below the tensors."""
    import guard_pages
    import torch

    torch.zeros(1, device="cuda")  # makes the context that mappings need
    problem = guard_pages.probe()
    if problem:
        return 0, [f"the guards do not hold: {problem}"]
    cases = []
    for layout in ("guard before", "guard behind"):
        for case in [*varlen_cases(), *list(dense_cases())[::5]]:
            if case.layout == "bshd" and not any(d % 8 for d in case.dims):
                case.layout = layout
                case.name += f", {layout}"
                cases.append(case)
    return run_cases(cases, False)


def probe_zero_stride():
    """Whether the driver takes a tensor map with a stride of 0."""
    import driver
    import torch

    x = torch.randn(64, 64, device="cuda").to(torch.bfloat16)
    try:
        driver.tensor_map(
            driver.DTYPE_BFLOAT16,
            x.data_ptr(),
            (64, 64, 4, 1, 1),
            (128, 0, 16, 16),
            (64, 64, 1, 1, 1),
        )
    except RuntimeError as error:
        return f"stride 0: refused by the driver ({error})"
    return "stride 0: accepted by the driver"


def phase_repeat():
    import attention_runner
    import torch

    failures, count = [], 0
    # Split, 128 full: a last wave of 12 tiles, and a single tile, in eight parts.
    shapes = [(dim, causal, 2, 6, 1536, 1536) for dim in (64, 128) for causal in (False, True)]
    shapes.append((128, False, 1, 1, 64, 4096))
    for dim, causal, batch, heads, rows, keys in shapes:
        q, k, v = (
            torch.randn(batch, n, heads, dim, device="cuda").to(torch.bfloat16)
            for n in (rows, keys, keys)
        )
        name, first = f"d{dim} causal={causal} {rows}x{keys}", None
        for blocks in (None, 7):
            o, lse = torch.empty_like(q), torch.empty(batch, heads, rows, device="cuda")
            call = attention_runner.Attention(q, k, v, o, lse, causal=causal, blocks=blocks)
            if (call.split_tiles != 0) != (dim == 128 and not causal):
                failures.append(f"{name}: {call.split_tiles} tiles are split")
            for _ in range(500):
                o.fill_(float("nan"))
                call.launch()
                count += 1
                if first is None:
                    first = o.clone(), lse.clone()
                elif not (torch.equal(o, first[0]) and torch.equal(lse, first[1])):
                    failures.append(f"{name}: repeat {count} differs")
                    break
    return count, failures


# ---- build


def all_specs():
    specs = set(attention_plan.registered())
    for dim in (64, 128):
        for causal in (False, True):
            specs |= set(variants(dim, causal).values())
    for bf16 in (0, 1):
        for causal in (0, 1):
            for varlen in (0, 1):
                for dims in ((64, 128), (128, 64)):
                    specs.add(attention_plan.select(bf16, *dims, causal, varlen))
    debugged = [s for s in specs if s.head_dim_qk == s.head_dim_v]
    specs |= {replace(s, debug_waits=1) for s in debugged}
    return sorted(specs, key=lambda s: s.name)


def _build(spec):
    import nvrtc

    image, log = nvrtc.compile_text(attention_plan.kernel_text(), spec.name, [spec.define])
    return spec, image, log


def phase_build():
    # attention_runner needs torch; the folder and file names are its.
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        print("no torch here: nothing to launch, so nothing is built")
        return 0, []
    import attention_runner

    attention_runner.CUBINS.mkdir(parents=True, exist_ok=True)
    attention_plan.library()
    failures, count = [], 0
    workers = max(1, len(os.sched_getaffinity(0)))
    with concurrent.futures.ProcessPoolExecutor(workers) as pool:
        for spec, image, log in pool.map(_build, all_specs()):
            if image is None:
                failures.append(f"{spec.name}: {log[:500]}")
                continue
            name = f"{spec.name}-{attention_runner.source_digest()}.cubin"
            (attention_runner.CUBINS / name).write_bytes(image)
            count += 1
    return count, failures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    phases = ("build", "tile", "debug", "check", "guard", "repeat", "time")
    parser.add_argument("phase", nargs="?", choices=(*phases, "small"))
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    if options.phase is None:
        status = 0
        for phase in phases:
            begin = time.time()
            command = [sys.executable, __file__, phase, "--rounds", str(options.rounds)]
            try:
                code = subprocess.run(command, timeout=LIMITS.get(phase, 200)).returncode
            except subprocess.TimeoutExpired:
                code = 124
            print(f"== {phase}: exit {code}, {time.time() - begin:.0f} s", flush=True)
            status = status or code
        sys.exit(status)
    run = {
        "build": phase_build,
        "tile": phase_tile,
        "debug": phase_debug,
        "check": phase_check,
        "guard": phase_guard,
        "repeat": phase_repeat,
        "small": phase_small,
        "time": lambda: phase_time(options.rounds),
    }[options.phase]
    count, failures = run()
    for f in failures[:40]:
        print("FAIL", f)
    print(f"{options.phase}: {count} done, {len(failures)} failures", flush=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
