"""The commands. Each returns the text to print; its docstring and annotations are its help."""

import importlib.metadata
import importlib.util
import json
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import onchip
from onchip import _native
from onchip._text import aligned
from onchip.cli.explain import explain
from onchip.cli.signature import refuse_unused
from onchip.errors import InvalidArgument, Unsupported

_FRAMEWORKS = ("numpy", "ml_dtypes", "torch", "jax", "cupy", "rich", "typer", "matplotlib")


def _rows(rows: Iterable[tuple[str, str]]) -> str:
    listed = list(rows)
    width = max(len(name) for name, _ in listed)
    return "".join(f"  {name:<{width}}  {text}\n" for name, text in listed)


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cupy() -> str:
    """CuPy's distributions are named after the CUDA version they are built for."""
    for name in ("cupy", "cupy-cuda13x", "cupy-cuda12x"):
        found = _installed(name)
        if found != "not installed":
            return found
    return "not installed"


def _found_or_why(part: dict[str, Any], found: str) -> str:
    return part["problem"] or found


def _archive(archive: dict[str, Any]) -> str:
    """A package without an archive is whole, and its absence no error."""
    if archive["problem"] and archive["path"] and not Path(archive["path"]).exists():
        return (
            "none: one is made where NVRTC is found while the package is built; "
            "each kernel is compiled at its first use"
        )
    return _found_or_why(archive, f"{archive['path']} ({archive['kernels']})")


def _gpu_rows(gpu: dict[str, Any]) -> Iterable[tuple[str, str]]:
    driver, nvrtc = gpu["driver"], gpu["nvrtc"]
    cache, archive = gpu["kernel_cache"], gpu["kernel_archive"]
    yield "driver", _found_or_why(driver, f"CUDA {driver['version']}, {driver['path']}")
    for device in gpu["devices"]:
        yield (
            f"device {device['ordinal']}",
            ", ".join(f"{key} {value}" for key, value in device.items() if key != "ordinal"),
        )
    yield "NVRTC", _found_or_why(nvrtc, f"{nvrtc['version']}, {nvrtc['path']}")
    yield "kernel cache", _found_or_why(cache, cache["directory"])
    yield "kernel archive", _archive(archive)


def doctor() -> str:
    """What this installation has: version, CPU, threads, backends, GPU driver and compiler,
    settings, array libraries.

    Nothing is imported or computed to find out. What is missing says why.
    """
    described = onchip.describe()
    threads = described["threads"]
    parts = [
        "onchip\n",
        _rows(
            [
                ("version", onchip.__version__),
                ("library", str(_native.__file__)),
                ("compiled by", described["compiler"]),
                ("Python", f"{platform.python_version()} ({platform.python_implementation()})"),
                ("system", platform.platform()),
                ("threads", f"{threads['in_use']} of {threads['available_cpus']} available CPUs"),
            ]
        ),
        "backends\n",
        _rows(
            (row["name"], ("" if row["available"] else "not available: ") + row["detail"])
            for row in described["backends"]
        ),
        "GPU\n",
        _rows(_gpu_rows(described["gpu"])),
        "settings\n",
        _rows((row["name"], f"{row['value']} ({row['origin']})") for row in described["settings"]),
        "".join(f"  problem: {problem}\n" for problem in described["setting_problems"]),
        "array libraries and extras\n",
        _rows((name, _cupy() if name == "cupy" else _installed(name)) for name in _FRAMEWORKS),
    ]
    return "".join(parts)


def kernels(
    action: Annotated[str, "list, warm, resources or build"],
    *,
    filter: Annotated[str, "only kernels whose name contains this", "TEXT"] = "",
    path: Annotated[str | None, "build: the archive file to write", "FILE"] = None,
) -> str:
    """GPU kernels ahead of their first call; needs NVRTC, no GPU.

    list: what is registered. warm: compile into the kernel cache. resources: registers, spills,
    shared memory of each. build: write an archive that a machine without NVRTC can use.
    """
    if action != "build":
        refuse_unused("kernels", action, {"path": (path, None)})
    if action == "list":
        return _table(_native.kernels_list(filter), ("name",))
    if action == "resources":
        return _table(
            _native.kernels_resources(filter),
            ("name", "origin", "registers", "spill_store_bytes", "dynamic_shared_bytes"),
        )
    if action == "warm":
        _native.kernels_warm(filter)
        return "compiled\n"
    if action == "build" and path is not None:
        _native.kernels_build(filter, path)
        return f"wrote {path}\n"
    if action == "build":
        raise InvalidArgument("kernels: path: got nothing, wanted a file to write")
    raise InvalidArgument(f"kernels: action: got {action!r}, wanted list, warm, resources or build")


def _table(text: str, columns: tuple[str, ...]) -> str:
    rows = [[str(row[column]) for column in columns] for row in json.loads(text)["kernels"]]
    return "".join(line + "\n" for line in aligned([list(columns), *rows]))


def _require(command: str, *packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise Unsupported(
            f"{command}: not installed: {', '.join(missing)} (pip install 'onchip[cli]')"
        )


def verify(
    operator: Annotated[str, "an operator of onchip.ops, or all"] = "all",
    *,
    backend: Annotated[str | None, "one by name; absent: every one that is here", "NAME"] = None,
    dtype: Annotated[str | None, "fp64, fp32, fp16 or bf16; absent: all", "DTYPE"] = None,
    seed: Annotated[int | None, "of the first case; absent: a new one", "N"] = None,
    count: Annotated[
        int | None, "cases of each operator; absent, without seconds: 200", "N"
    ] = None,
    seconds: Annotated[float | None, "time after which no case begins", "SECONDS"] = None,
    longest: Annotated[int | None, "most rows of a sequence; absent: up to 200", "N"] = None,
) -> str:
    """Random calls, shapes and options, on every backend, each result compared with fp64 as
    docs/semantics.md, section 5, asks.

    Results start as NaN. Shows the worst element of each operator and backend; of a failure also
    the call, and the command that repeats it. The exit status is 1 if anything failed.

    onchip verify attention_forward --dtype bf16 --seconds 60
    """
    _require("verify", "numpy", "ml_dtypes")
    from onchip.cli.verify import run_verify

    return run_verify(operator, backend, dtype, seed, count, seconds, longest)


def bench(
    cases: Annotated[str | None, "names, with commas between them"] = None,
    *,
    file: Annotated[str | None, "a file of names, one a line, # before remarks", "FILE"] = None,
    phase: Annotated[str | None, "fwd, bwd, fwdbwd, one or more; absent: fwd", "WORD,.."] = None,
    dtype: Annotated[
        str | None, "fp64, fp32, fp16, bf16, one or more; absent: fp32", "DTYPE,.."
    ] = None,
    head_dim: Annotated[str | None, "one or more; absent: 64", "N,N,.."] = None,
    mask: Annotated[
        str | None, "full, causal, window<keys back>, one or more; absent: causal", "MASK,.."
    ] = None,
    seqlen: Annotated[str | None, "one or more; absent: 1024,4096", "N,N,.."] = None,
    heads: Annotated[
        str | None, "of queries, or 32k8: 8 of keys; absent: 2048 / head_dim", "N[kN]"
    ] = None,
    batch: Annotated[
        int | None, "sequences; absent: 16384 / seqlen, which is much for a CPU", "N"
    ] = None,
    impl: Annotated[
        str | None, "implementations; absent: every one that is here", "NAME,NAME,.."
    ] = None,
    rounds: Annotated[int, "samples of each, at least 5", "N"] = 5,
    threads: Annotated[int | None, "of the CPU; absent: as onchip starts with", "N"] = None,
    limit: Annotated[
        float, "what would take longer in a call is left out; absent: 10", "SECONDS"
    ] = 10.0,
    seed: Annotated[int, "of inputs and order", "N"] = 0,
    out: Annotated[str | None, "write a record, .json", "FILE"] = None,
    plot: Annotated[str | None, "draw the figures, .png, .svg or .pdf", "FILE"] = None,
) -> str:
    """Times cases on every backend that is here, and on PyTorch's attention if that is installed.

    Everything runs in one process, warm, in random order, round after round. Shown are speed, the
    ratio to PyTorch, and the share of what this machine reaches at best, which is measured first.

    A case's name is one of

    attention/<fwd|bwd|fwdbwd>/<dtype>/<dims>/<full|causal|window<left>>/[b<batch>]s<seqlen>

    attention/step/<dtype>/<dims>/<contiguous|paged<page size>>/[b<batch>]s<keys>

    linear/<fwd|bwd|fwdbwd>/<dtype>/<dims>[v<head_dim_v>]/<operator>/[b<batch>]s<tokens>

    with dims [h<heads>[k<key heads>]]d<head_dim>.

    onchip bench --dtype fp32,bf16 --head-dim 64,128 --out record.json --plot figures.png
    """
    _require("bench", "numpy", *(["ml_dtypes", "matplotlib"] if plot else ["ml_dtypes"]))
    from onchip.cli.bench import run_bench

    return run_bench(
        names=cases,
        file=file,
        flags=(phase, dtype, head_dim, mask, seqlen),
        heads=heads,
        batch=batch,
        impl=impl,
        rounds=rounds,
        threads=threads,
        limit=limit,
        seed=seed,
        out=out,
        plot_path=plot,
    )


COMMANDS: list[Callable[..., str]] = [doctor, explain, verify, bench, kernels]
