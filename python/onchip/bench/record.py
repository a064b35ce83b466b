"""Records: one JSON file a run, with what is needed to judge its figures (bench/README.md)."""

import datetime
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import onchip
from onchip import _native

Record = dict[str, Any]

SCHEMA = 1
_PACKAGES = ("onchip", "numpy", "torch")
_MATMUL_SIZE = 2048


def build(results: list[Record], skipped: list[Record], **known: Any) -> Record:
    """`skipped` has case, impl and reason of what was asked for and could not be measured. `known`
    are fields that are not to be found out here: the commit, the ceilings of a GPU."""
    record = {
        "schema": SCHEMA,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": None,
        "dirty": None,
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "machine": machine(),
        "versions": versions(),
        "results": results,
        "skipped": skipped,
        **known,
    }
    if "ceilings" not in record:
        record["ceilings"] = ceilings()
    check(record)
    return record


def checkout(folder: Path) -> Record:
    """`commit` and `dirty` of what is measured, where that was built from this folder's sources."""
    commit = _git(folder, "rev-parse", "HEAD")
    return {
        "commit": commit,
        "dirty": None if commit is None else bool(_git(folder, "status", "--porcelain")),
    }


def write(record: Record, path: Path) -> None:
    check(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def machine() -> Record:
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "threads": onchip.get_num_threads(),
        "gpu": None,  # none takes part, unless the caller says so
    }


def gpu_facts() -> Record:
    """Of device 0, for the record's machine: what bounds its speed."""
    fields = (
        "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,power.draw,"
        "temperature.gpu"
    )
    answer = subprocess.run(
        ["nvidia-smi", "-i", "0", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    )
    name, driver, *numbers = (part.strip() for part in answer.stdout.strip().split(","))
    sm, memory, max_sm, limit, draw, celsius = (
        float(x) if re.fullmatch(r"[\d.]+", x) else None for x in numbers
    )
    return {
        "gpu": name,
        "driver": driver,
        "clocks": {"sm_mhz": sm, "memory_mhz": memory, "max_sm_mhz": max_sm},
        "power_limit": limit,
        "power_draw": draw,
        "temperature": celsius,
    }


def versions() -> Record:
    found: Record = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    config: Any = np.show_config(mode="dicts")
    found["compiler"] = onchip.describe()["compiler"]
    found["blas"] = config["Build Dependencies"]["blas"]["name"]
    return found


def ceilings() -> Record:
    """What the CPU reaches at best here, in the same run, on the threads that onchip uses: bounds
    to read the figures against. And what matrix products of NumPy's BLAS do."""
    a = np.ones((_MATMUL_SIZE, _MATMUL_SIZE), np.float32)
    product = np.empty_like(a)
    matmul_s = _best_time(lambda: np.matmul(a, a, out=product))
    return {
        **_native.measure_peaks(onchip.get_num_threads()),
        "matmul_fp32_tflops": 2 * _MATMUL_SIZE**3 / matmul_s / 1e12,
    }


def check(record: Record) -> None:
    """Raises ValueError for a record that a reader could not judge."""
    _require(record, "record", _RECORD_FIELDS)
    if record["schema"] != SCHEMA:
        raise ValueError(f"record.schema: got {record['schema']!r}, wanted {SCHEMA}")
    for index, result in enumerate(record["results"]):
        place = f"record.results[{index}]"
        _require(result, place, _TIME_FIELDS)
        if result["case"].startswith("host/"):
            _require(result, place, {"host_us": _NUMBER})
        elif not result["case"].startswith("first_call/"):
            _require(result, place, _OPERATOR_FIELDS)
            _require(result["error"], f"{place}.error", _ERROR_FIELDS)
        if not result["samples_ms"] or statistics.median(result["samples_ms"]) != result["ms"]:
            raise ValueError(f"{place}.ms: got {result['ms']!r}, wanted the median of samples_ms")
    for index, entry in enumerate(record["skipped"]):
        _require(
            entry, f"record.skipped[{index}]", dict.fromkeys(("case", "impl", "reason"), (str,))
        )


_NUMBER = (int, float)
_OR_NONE = (type(None),)
_RECORD_FIELDS: dict[str, tuple[type, ...]] = {
    "schema": (int,),
    "created": (str,),
    "commit": (str, *_OR_NONE),
    "dirty": (bool, *_OR_NONE),
    "command": (str,),
    "machine": (dict,),
    "versions": (dict,),
    "ceilings": (dict,),
    "results": (list,),
    "skipped": (list,),
}
_TIME_FIELDS: dict[str, tuple[type, ...]] = {
    "case": (str,),
    "impl": (str,),
    "backend": (str,),
    "kernel": (str,),
    "ms": _NUMBER,
    "samples_ms": (list,),
}
_OPERATOR_FIELDS: dict[str, tuple[type, ...]] = {
    "tflops": _NUMBER,
    "gbps": _NUMBER,
    "peak_bytes": (int, *_OR_NONE),
    "error": (dict,),
}
_ERROR_FIELDS: dict[str, tuple[type, ...]] = {"vs": (str,), "max": _NUMBER, "rms": _NUMBER}


def _require(entry: Record, place: str, fields: dict[str, tuple[type, ...]]) -> None:
    for name, kinds in fields.items():
        if not isinstance(entry.get(name, ...), kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{place}.{name}: got {entry.get(name)!r}, wanted {wanted}")


def _best_time(call: Callable[[], object], repeats: int = 5) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def _git(folder: Path, *arguments: str) -> str | None:
    """None outside a checkout, or where git is not installed."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()
