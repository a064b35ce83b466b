"""Pages with figures, rendered from records and never typed: docs/performance.md and a part of
README.md. `python -m bench.render` writes them, `--check` fails if they are not up to date."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Result = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "bench" / "records"
PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
BEGIN = "<!-- figures: rendered by bench/render.py -->"
END = "<!-- end of figures -->"

_NONE = "There is no record yet."


def read_records(folder: Path) -> list[tuple[str, Record]]:
    """By file name, the newest first."""
    named = [
        (path.name, json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.json")
    ]
    return sorted(named, key=lambda item: (item[1]["created"], item[0]), reverse=True)


def _kind(case: str) -> str:
    return case.split("/")[0]


def _of(record: Record, *kinds: str) -> list[Result]:
    return [result for result in record["results"] if _kind(result["case"]) in kinds]


def _operators(record: Record) -> list[Result]:
    return [r for r in record["results"] if _kind(r["case"]) not in ("host", "first_call")]


def _names(results: Iterable[Result], key: str) -> list[str]:
    return list(dict.fromkeys(result[key] for result in results))


def _best_peer(results: list[Result]) -> Result | None:
    peers = [r for r in results if not r["impl"].startswith("onchip")]
    return max(peers, key=lambda r: r["tflops"]) if peers else None


def _cells(results: list[Result]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table: a case a row, TFLOP/s of each implementation; of onchip also the
    ratio to the best other one and the use of the tensor pipe."""
    impls = _names(results, "impl")
    with_pipe = any("pipe_use" in r for r in results)
    head = ["case", *impls, "onchip / best other"]
    head += ["pipe use"] if with_pipe else []
    rows = []
    for case in _names(results, "case"):
        here = [r for r in results if r["case"] == case]
        by_impl = {r["impl"]: r for r in here}
        ours = next((r for r in here if r["impl"].startswith("onchip")), None)
        best = _best_peer(here)
        row = [case, *(_tflops(by_impl.get(impl)) for impl in impls)]
        ratio = ours["tflops"] / best["tflops"] if ours and best else None
        row.append("" if ratio is None else f"{ratio:.2f}")
        if with_pipe:
            use = ours.get("pipe_use") if ours else None
            row.append("" if use is None else f"{100 * use:.1f} %")
        rows.append(row)
    return head, rows


def _tflops(result: Result | None) -> str:
    if result is None:
        return ""
    return f"{result['tflops']:.0f}" if result["tflops"] >= 10 else f"{result['tflops']:.3f}"


def _markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _plain(head: list[str], rows: list[list[str]]) -> list[str]:
    table = [head, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def _times(record: Record) -> tuple[list[str], list[list[str]]]:
    """Host times and first calls."""
    rows = []
    for result in _of(record, "host", "first_call"):
        host = _kind(result["case"]) == "host"
        value = f"{result['host_us']:.2f} µs" if host else f"{result['ms']:.1f} ms"
        rows.append([result["case"], result["impl"], value])
    return ["what", "by", "median"], rows


def _precision(record: Record) -> tuple[list[str], list[list[str]]]:
    rows = []
    for result in _operators(record):
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


def text_table(record: Record) -> str:
    """For a terminal."""
    lines = _plain(*_cells(_operators(record)))
    head, rows = _times(record)
    if rows:
        lines += ["", *_plain(head, rows)]
    return "\n".join(lines)


def _machine(record: Record) -> str:
    machine = record["machine"]
    parts = [machine["gpu"] or machine["cpu"]]
    if machine["gpu"]:
        parts.append(f"driver {machine['driver']}")
        parts.append(f"{machine['clocks']['sm_mhz']:.0f} MHz just after")
        parts.append(f"power limit {machine['power_limit']:.0f} W")
    else:
        parts.append(f"{machine['cores']} cores")
    return ", ".join(parts)


def _ceilings(record: Record) -> str:
    words = []
    for name, value in record["ceilings"].items():
        what, _, unit = name.rpartition("_")
        unit = {"tbps": "TB/s", "tflops": "TFLOP/s"}.get(unit, unit)
        words.append(f"{what.replace('_', ' ')} {value:.3g} {unit}")
    return ", ".join(words)


def _section(name: str, record: Record) -> list[str]:
    commit = (record["commit"] or "no commit")[:12]
    dirty = " with changes" if record["dirty"] else ""
    versions = ", ".join(f"{key} {value}" for key, value in record["versions"].items())
    lines = [
        f"## {_machine(record)}, {record['created'][:10]}",
        "",
        f"Record `bench/records/{name}`, commit {commit}{dirty}. {versions}.",
        f"Ceilings of the same run: {_ceilings(record)}.",
        "",
        "TFLOP/s, median:",
        "",
        *_markdown(*_cells(_operators(record))),
    ]
    head, rows = _times(record)
    if rows:
        lines += ["", *_markdown(head, rows)]
    lines += ["", "Errors against fp64 on sampled rows:", "", *_markdown(*_precision(record))]
    for skipped in record["skipped"]:
        lines += [
            "",
            f"Not measured: {skipped['impl']} on `{skipped['case']}`: {skipped['reason']}",
        ]
    return [*lines, ""]


def performance_page(records: list[tuple[str, Record]]) -> str:
    lines = [
        "# Performance",
        "",
        "Rendered by `bench/render.py` from the records in `bench/records/`; how they are measured",
        "and what a case's name says is in `bench/README.md`.",
        "",
    ]
    if not records:
        lines += [_NONE, ""]
    for name, record in records:
        lines += _section(name, record)
    return "\n".join(lines).rstrip("\n") + "\n"


def readme_part(records: list[tuple[str, Record]]) -> str:
    """The newest record of a GPU, else the newest one."""
    lines = [BEGIN, ""]
    on_gpu = [item for item in records if item[1]["machine"]["gpu"]]
    chosen = next(iter(on_gpu or records), None)
    if chosen is None:
        lines.append(f"{_NONE} Figures are rendered from records alone.")
    else:
        _, record = chosen
        lines.append(f"TFLOP/s on {_machine(record)}, {record['created'][:10]}:")
        lines += ["", *_markdown(*_cells(_operators(record)))]
        lines += ["", "More, with errors and memory: [performance](docs/performance.md)."]
    return "\n".join([*lines, "", END])


def with_part(readme: str, part: str) -> str:
    """The README with what is between the marks replaced."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md: wanted {BEGIN!r} and then {END!r}")
    return before + part + after


def rendered() -> dict[Path, str]:
    records = read_records(RECORDS)
    readme = README.read_text(encoding="utf-8")
    return {PAGE: performance_page(records), README: with_part(readme, readme_part(records))}


def stale() -> list[str]:
    return [
        path.relative_to(ROOT).as_posix()
        for path, text in rendered().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    if arguments.check:
        names = stale()
        if names:
            print(f"not as rendered: {', '.join(names)}: run python -m bench.render")
        return 1 if names else 0
    for path, text in rendered().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
