"""The figures of a record as tables."""

from collections.abc import Iterable
from typing import Any

from onchip._text import aligned

_SHARES = ("pipe_use", "bandwidth_use")
# So much do runs differ; what is above has more than one reason.
_MOST_SHARE = 1.02

Record = dict[str, Any]
Result = dict[str, Any]
Table = tuple[list[str], list[list[str]]]  # head and rows


def _kind(case: str) -> str:
    return case.split("/")[0]


def _is_step(result: Result) -> bool:
    return bool(result["case"].split("/")[1] == "step")


def operators(record: Record) -> list[Result]:
    return [r for r in record["results"] if _kind(r["case"]) not in ("host", "first_call")]


def computing(record: Record) -> list[Result]:
    return [r for r in operators(record) if not _is_step(r)]


def steps(record: Record) -> list[Result]:
    """Of decoding, which reads more than it computes."""
    return [r for r in operators(record) if _is_step(r)]


def _names(results: Iterable[Result], key: str) -> list[str]:
    return list(dict.fromkeys(result[key] for result in results))


def _is_ours(result: Result) -> bool:
    return bool(result["impl"].startswith("onchip"))


def on_gpu(record: Record) -> bool:
    return record["machine"]["gpu"] is not None


def unit(record: Record) -> str:
    """What `speeds` shows, and of which sample."""
    return "TFLOP/s, median" if on_gpu(record) else "GFLOP/s, best sample"


def _scaled(result: Result, record: Record, key: str, factor: float) -> float:
    """A rate that the record has for the median; on a CPU of the best sample: what disturbs a
    machine that has other work only ever slows it down."""
    ms = result["ms"] if on_gpu(record) else min(result["samples_ms"])
    return float(result[key] * result["ms"] / ms * factor)


def speed(result: Result, record: Record) -> float:
    return _scaled(result, record, "tflops", 1.0 if on_gpu(record) else 1e3)


def bandwidth(result: Result, record: Record) -> float:
    return _scaled(result, record, "gbps", 1.0)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 10 else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _compared(results: list[Result], record: Record, rate: Any, use: str, use_title: str) -> Table:
    """A case a row: the rate of each implementation, the ratio of onchip's best to the best other
    one, and onchip's share of what the machine reaches."""
    impls = _names(results, "impl")
    with_ratio = not all(map(_is_ours, results))
    with_use = any(use in r for r in results)
    head = ["case", *impls]
    head += ["onchip / best other"] if with_ratio else []
    head += [use_title] if with_use else []
    rows = []
    for case in _names(results, "case"):
        here = {r["impl"]: r for r in results if r["case"] == case}
        rates = {impl: rate(result, record) for impl, result in here.items()}
        own = [impl for impl in here if _is_ours(here[impl])]
        ours = max(own, key=lambda impl: rates[impl], default=None)
        best = max((rates[impl] for impl in here if not _is_ours(here[impl])), default=None)
        row = [case, *(_number(rates.get(impl)) for impl in impls)]
        if with_ratio:
            row.append(f"{rates[ours] / best:.2f}" if ours and best else "")
        if with_use:
            row.append(_percent(here[ours].get(use) if ours else None))
        rows.append(row)
    return head, rows


def speeds(record: Record) -> Table:
    title = "pipe use" if on_gpu(record) else "of peak"
    return _compared(computing(record), record, speed, "pipe_use", title)


def bandwidths(record: Record) -> Table:
    """GB/s of decoding steps."""
    return _compared(steps(record), record, bandwidth, "bandwidth_use", "of read bandwidth")


def times(record: Record) -> Table:
    """Host times and first calls."""
    rows = []
    for result in record["results"]:
        kind = _kind(result["case"])
        if kind in ("host", "first_call"):
            host = kind == "host"
            value = f"{result['host_us']:.2f} µs" if host else f"{result['ms']:.1f} ms"
            rows.append([result["case"], result["impl"], value])
    return ["what", "by", "median"], rows


def precision(record: Record) -> Table:
    rows = []
    for result in operators(record):
        error = result["error"]
        peak = result["peak_bytes"]
        rows.append(
            [
                result["case"],
                result["impl"],
                f"{error['rms']:.2e}",
                f"{error['max']:.2e}",
                "" if peak is None else f"{peak / 2**20:.1f}",
            ]
        )
    return ["case", "by", "RMS error", "largest error", "extra memory, MiB"], rows


def ceilings(record: Record) -> str:
    words = []
    for name, value in record["ceilings"].items():
        what, _, suffix = name.rpartition("_")
        shown = {"tbps": "TB/s", "tflops": "TFLOP/s"}.get(suffix, suffix)
        words.append(f"{what.replace('_', ' ')} {value:.3g} {shown}")
    return ", ".join(words)


def remark(record: Record) -> str:
    """What takes the meaning from the shares, if anything does."""
    best = max((r.get(use, 0.0) for r in record["results"] for use in _SHARES), default=0.0)
    if best <= _MOST_SHARE:
        return ""
    return (
        f"{100 * best:.0f} % of what the machine reaches at best: it had other work when that was "
        "measured, and the shares mean nothing\n"
    )


def text_table(record: Record) -> str:
    """For a terminal."""
    parts = []
    for title, (head, rows), numbers_from in (
        (unit(record), speeds(record), 1),
        ("GB/s", bandwidths(record), 1),
        ("", times(record), 2),
    ):
        if rows:
            lines = aligned([head, *rows], numbers_from)
            parts.append("\n".join([title, *lines] if title else lines))
    return "\n\n".join(parts)
