"""The commands. Each returns the text to print; its docstring and annotations are its help."""

import importlib.metadata
import importlib.util
import json
import platform
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import onchip
from onchip import _native
from onchip._text import aligned
from onchip.cli.signature import parameters
from onchip.errors import InvalidArgument, Unsupported

_FRAMEWORKS = ("numpy", "ml_dtypes", "torch", "jax", "cupy", "rich", "typer", "matplotlib")

_DTYPES = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "e4m3": "float8_e4m3",
}


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
    yield "kernel archive", _found_or_why(archive, f"{archive['path']} ({archive['kernels']})")


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


def _integers(name: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise InvalidArgument(
            f"explain: {name}: got {text!r}, wanted integers with commas between them"
        ) from None


class _Shapes:
    """Array specs of one dtype and device from the texts of the command line."""

    def __init__(self, dtype: str, device: str) -> None:
        self.dtype = _DTYPES.get(dtype, dtype)
        self.device = device
        self.lse_dtype = "float64" if self.dtype == "float64" else "float32"

    def of(self, shape: Iterable[int], dtype: str | None = None) -> onchip.ArraySpec:
        return onchip.ArraySpec(tuple(shape), dtype or self.dtype, self.device)

    def parse(self, name: str, text: str | None, dtype: str | None = None) -> Any:
        shape = _integers(name, text)
        return None if shape is None else self.of(shape, dtype)

    def lse_of(self, o: onchip.ArraySpec) -> onchip.ArraySpec:
        rows_and_heads = tuple(o.shape)[:-1]
        return self.of(rows_and_heads[:-2] + rows_and_heads[-2:][::-1], self.lse_dtype)


def _refuse_unused(command: str, action: str, given: dict[str, tuple[Any, Any]]) -> None:
    """given: what `action` has no use for, as (value, default)."""
    for name, (value, default) in given.items():
        if value != default:
            raise InvalidArgument(
                f"{command}: {name}: got {value!r}, wanted nothing: {action} does not take it"
            )


def explain(
    operator: Annotated[str, "attention_forward, attention_backward or merge"],
    *,
    q: Annotated[str | None, "shape of q: batch,seqlen_q,heads,dim, or total,heads,dim"] = None,
    k: Annotated[str | None, "shape of k; absent: as q"] = None,
    v: Annotated[str | None, "shape of v; absent: as k"] = None,
    o1: Annotated[str | None, "merge: shape of each part"] = None,
    dtype: Annotated[str, "float64 float32 float16 bfloat16, or fp64 fp32 fp16 bf16"] = "float32",
    device: Annotated[str, "cpu, cuda or cuda:N"] = "cpu",
    scale: Annotated[float | None, "of q.k; absent: head_dim_qk ** -0.5"] = None,
    causal: Annotated[bool, "query i sees keys j <= i + off"] = False,
    alignment: Annotated[str, "bottom_right or top_left"] = "bottom_right",
    window_left: Annotated[int, "-1: no bound"] = -1,
    window_right: Annotated[int, "-1: no bound"] = -1,
    softcap: Annotated[float, "0: none"] = 0.0,
    bias: Annotated[str | None, "shape of bias"] = None,
    mask: Annotated[str | None, "shape of mask"] = None,
    alibi_slopes: Annotated[str | None, "shape of alibi_slopes"] = None,
    segment_ids: Annotated[bool, "with q_segment_ids and kv_segment_ids"] = False,
    sink: Annotated[bool, "with a sink"] = False,
    dropout_p: Annotated[float, "in [0, 1)"] = 0.0,
    cu_seqlens_q: Annotated[str | None, "values, e.g. 0,100,300"] = None,
    cu_seqlens_kv: Annotated[str | None, "values"] = None,
    seqlens_q: Annotated[str | None, "values"] = None,
    seqlens_kv: Annotated[str | None, "values"] = None,
    max_seqlen_q: Annotated[int | None, "a hint"] = None,
    max_seqlen_kv: Annotated[int | None, "a hint"] = None,
    precision: Annotated[str | None, "tf32"] = None,
    deterministic: Annotated[bool, "backward bitwise repeatable"] = False,
    batch_invariant: Annotated[bool, "bits do not depend on the rest of the call"] = False,
    check: Annotated[bool, "validate values on a GPU too"] = False,
    backend: Annotated[str | None, "force one by name"] = None,
) -> str:
    """Which backend would take a call given by its shapes, and why each other one would not.

    onchip explain attention_forward --dtype bf16 --q 2,1024,16,128 --k 2,1024,4,128 --causal
    """
    given = locals()
    used_by_merge = ("operator", "o1", "dtype", "device", "backend")
    is_merge = operator == "merge"
    _refuse_unused(
        "explain",
        operator,
        {
            parameter.name: (given[parameter.name], parameter.default)
            for parameter in parameters(explain)
            if (parameter.name not in used_by_merge if is_merge else parameter.name == "o1")
        },
    )
    shapes = _Shapes(dtype, device)
    if is_merge:
        part = shapes.parse("o1", o1)
        if part is None:
            raise InvalidArgument("explain: o1: got nothing, wanted the shape of a part")
        lse = shapes.lse_of(part)
        return onchip.explain("merge", part, lse, part, lse, backend=backend)
    k, v = k or q, v or k or q
    arrays = [shapes.parse(name, text) for name, text in (("q", q), ("k", k), ("v", v))]
    if arrays[0] is None:
        raise InvalidArgument("explain: q: got nothing, wanted its shape")
    q_shape, k_shape = tuple(arrays[0].shape), tuple(arrays[1].shape)
    if operator == "attention_backward":
        o = shapes.of(q_shape[:-1] + tuple(arrays[2].shape)[-1:])
        arrays = [o, *arrays, o, shapes.lse_of(o)]
    return onchip.explain(
        operator,
        *arrays,
        scale=scale,
        causal=causal,
        alignment=alignment,
        window=(window_left, window_right),
        softcap=softcap,
        bias=shapes.parse("bias", bias),
        mask=shapes.parse("mask", mask, "bool"),
        alibi_slopes=shapes.parse("alibi_slopes", alibi_slopes, "float32"),
        q_segment_ids=shapes.of(q_shape[:-2], "int32") if segment_ids else None,
        kv_segment_ids=shapes.of(k_shape[:-2], "int32") if segment_ids else None,
        sink=shapes.of(q_shape[-2:-1], "float32") if sink else None,
        dropout_p=dropout_p,
        dropout_rng=(0, 0) if dropout_p else None,
        cu_seqlens_q=_integers("cu_seqlens_q", cu_seqlens_q),
        cu_seqlens_kv=_integers("cu_seqlens_kv", cu_seqlens_kv),
        seqlens_q=_integers("seqlens_q", seqlens_q),
        seqlens_kv=_integers("seqlens_kv", seqlens_kv),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_kv,
        precision=precision,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        check=check,
        backend=backend,
    )


def kernels(
    action: Annotated[str, "list, warm, resources or build"],
    *,
    filter: Annotated[str, "only kernels whose name contains this"] = "",
    path: Annotated[str | None, "build: the archive file to write"] = None,
) -> str:
    """GPU kernels ahead of their first call; needs NVRTC, no GPU.

    list: what is registered. warm: compile into the kernel cache. resources: registers, spills,
    shared memory of each. build: write an archive that a machine without NVRTC can use.
    """
    if action != "build":
        _refuse_unused("kernels", action, {"path": (path, None)})
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
            f"{command}: {', '.join(missing)} is not installed: pip install 'onchip[cli]'"
        )


def verify(
    operator: Annotated[str, "an operator of onchip.ops, or all"] = "all",
    *,
    backend: Annotated[str | None, "one by name; absent: every one that is here"] = None,
    dtype: Annotated[str | None, "fp64, fp32, fp16 or bf16; absent: all"] = None,
    seed: Annotated[int | None, "of the first case; absent: a new one"] = None,
    count: Annotated[int | None, "cases; absent, without seconds: 200"] = None,
    seconds: Annotated[float | None, "time after which no case begins"] = None,
) -> str:
    """Random calls, shapes and options, on every backend, each result compared with fp64 as
    docs/semantics.md, section 5, asks.

    Results start as NaN. Shows the worst element of each operator and backend; of a failure also
    the call, and the command that repeats it. The exit status is 1 if anything failed.

    onchip verify attention_forward --dtype bf16 --seconds 60
    """
    _require("verify", "numpy", "ml_dtypes")
    from onchip.cli.verify import run_verify

    return run_verify(operator, backend, dtype, seed, count, seconds)


def bench(
    cases: Annotated[str | None, "names, with commas between them; see below"] = None,
    *,
    file: Annotated[str | None, "a file of names, one a line, # before remarks"] = None,
    phase: Annotated[str | None, "fwd, bwd, fwdbwd; this and the next five: one or more"] = None,
    dtype: Annotated[str | None, "fp64, fp32, fp16, bf16"] = None,
    head_dim: Annotated[str | None, "such as 64,128"] = None,
    mask: Annotated[str | None, "full, causal, window<keys back>"] = None,
    seqlen: Annotated[str | None, "such as 1024,4096"] = None,
    heads: Annotated[str | None, "of the queries, or 32k8: 8 key heads; absent: 2048 / dim"] = None,
    batch: Annotated[int | None, "sequences; absent: 16384 / seqlen"] = None,
    impl: Annotated[str | None, "implementations; absent: every one that is here"] = None,
    rounds: Annotated[int, "samples of each, at least 5"] = 5,
    threads: Annotated[int | None, "of the CPU; absent: as onchip starts with"] = None,
    limit: Annotated[float, "seconds: what would take longer in a call is left out"] = 10.0,
    seed: Annotated[int, "of inputs and order"] = 0,
    out: Annotated[str | None, "write a record, .json"] = None,
    plot: Annotated[str | None, "draw the figures, .png, .svg or .pdf"] = None,
) -> str:
    """Times cases on every backend that is here, and on PyTorch's attention if that is installed.

    Everything runs in one process, warm, in random order, round after round. Shown are speed, the
    ratio to PyTorch, and the share of what this machine reaches at best, which is measured first.

    A case is attention/<fwd|bwd|fwdbwd>/<dtype>/[h<heads>[k<key heads>]]d<head_dim>/
    <full|causal|window<left>>/[b<batch>]s<seqlen>, or, decoding,
    attention/step/<dtype>/<dims>/<contiguous|paged<page size>>/[b<batch>]s<keys>.

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
