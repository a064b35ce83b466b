"""Pages with figures, rendered from records and never typed: docs/performance.md and a part of
README.md. `python -m bench.render` writes them, `--check` fails if they are not up to date."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from onchip.bench import table

Record = dict[str, Any]

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


def _markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _machine(record: Record) -> str:
    machine = record["machine"]
    parts = [machine["gpu"] or machine["cpu"]]
    if machine["gpu"]:
        parts.append(f"driver {machine['driver']}")
        parts.append(f"{machine['clocks']['sm_mhz']:.0f} MHz just after")
        parts.append(f"power limit {machine['power_limit']:.0f} W")
    else:
        parts.append(f"{machine.get('threads', machine['cores'])} threads")
    return ", ".join(parts)


_NAMES = (
    "A case's name says what is computed: `h16d128` is 16 heads with head_dim 128 (`h64k8`: 8 of",
    "the keys), `full` and `causal` the mask, `b4s4096` 4 sequences of 4096 tokens each.",
)
_PIPE_USE = (
    "`pipe use` is the share of a GPU's tensor cores that is busy, and does not depend on its",
    "clock: FLOPs over 4096 a clock and multiprocessor in the clocks of the longest block.",
)
_OF_PEAK = (
    "`of peak` is the share of what the CPU's arithmetic, on as many threads, reached in the",
    "same run.",
)


def _measured(record: Record) -> set[tuple[str, str]]:
    return {(result["case"], result["impl"]) for result in record["results"]}


def _standing(record: Record, newer: list[Record]) -> list[str]:
    """Whether a record's figures are the current ones, next to newer records of its machine."""
    machine = "gpu" if record["machine"]["gpu"] else "cpu"
    again: set[tuple[str, str]] = set()
    for other in newer:
        if other["machine"][machine] == record["machine"][machine]:
            again |= _measured(other)
    if not _measured(record) & again:
        return ["Its figures are the current ones.", ""]
    rest = [r for r in record["results"] if (r["case"], r["impl"]) not in again]
    kept = dict.fromkeys(r["case"] if r["impl"].startswith("onchip") else r["impl"] for r in rest)
    for_what = ", ".join(f"`{word}`" for word in kept) or "nothing that a newer one lacks"
    return [
        "Superseded by the newer record of this machine above, and kept for what that one does not",
        f"have: {for_what}.",
        "",
    ]


def _section(name: str, record: Record, newer: list[Record]) -> list[str]:
    commit = (record["commit"] or "no commit")[:12]
    dirty = " with changes" if record["dirty"] else ""
    versions = ", ".join(f"{key} {value}" for key, value in record["versions"].items())
    lines = [
        f"## {_machine(record)}, {record['created'][:10]}",
        "",
        f"Record `bench/records/{name}`, commit {commit}{dirty}. {versions}.",
        f"Ceilings of the same run: {table.ceilings(record)}.",
        "",
        *_standing(record, newer),
    ]
    for title, (head, rows) in (
        (f"{table.unit(record)}:", table.speeds(record)),
        ("Decoding, GB/s:", table.bandwidths(record)),
        ("Host times and first calls:", table.times(record)),
        ("Errors against fp64 on sampled rows:", table.precision(record)),
    ):
        if rows:
            lines += [title, "", *_markdown(head, rows), ""]
    for skipped in record["skipped"]:
        lines += [
            f"Not measured: {skipped['impl']} on `{skipped['case']}`: {skipped['reason']}",
            "",
        ]
    return lines


def performance_page(records: list[tuple[str, Record]]) -> str:
    lines = [
        "# Performance",
        "",
        "Rendered by `bench/render.py` from the records in `bench/records/`; how they are measured",
        "and what a case's name says is in `bench/README.md`.",
        "",
        "All implementations of a case run in one process, warm, in random order, round after",
        "round. FLOPs are 4 head_dim for each pair of a query and a key (half of them if causal),",
        "2.5 times that for a backward pass; of linear attention, those of its chunked form with",
        "chunks of 64 tokens: whatever an implementation computes. On a GPU a figure is the",
        "median, the L2 cache overwritten before each call; on CPUs the best sample.",
        "",
        *_NAMES,
        *_PIPE_USE,
        *_OF_PEAK,
        "`of read bandwidth` is that of reading the same caches just before, the median.",
        "",
    ]
    if not records:
        lines += [_NONE, ""]
    for index, (name, record) in enumerate(records):
        lines += _section(name, record, [other for _, other in records[:index]])
    return "\n".join(lines).rstrip("\n") + "\n"


def _readme_table(record: Record, of_record: Record) -> list[str]:
    lines = [f"{table.unit(record)}, on {_machine(record)}, {record['created'][:10]}:", ""]
    return [*lines, *_markdown(*table.speeds(of_record)), ""]


def readme_part(records: list[tuple[str, Record]]) -> str:
    """The newest record of a GPU; the newest of a CPU that has a peer, its wider heads; what their
    words mean."""
    lines = [BEGIN, ""]
    newest = [record for _, record in records]
    gpu = next(filter(table.on_gpu, newest), None)
    cpu = next((r for r in newest if not table.on_gpu(r) and _has_peer(r)), None)
    if gpu is not None or cpu is not None:
        lines += [*_NAMES, ""]
    if gpu is not None:
        lines += [*_readme_table(gpu, gpu), *_PIPE_USE, ""]
    if cpu is not None:
        wide = [r for r in cpu["results"] if "d128/" in r["case"]]
        of_cpu = {**cpu, "results": wide or cpu["results"]}
        lines += [*_readme_table(cpu, of_cpu), *_OF_PEAK, ""]
    if gpu is None and cpu is None:
        lines += [f"{_NONE} Figures are rendered from records alone.", ""]
    else:
        lines += ["More, with errors and memory: [performance](docs/performance.md).", ""]
    return "\n".join([*lines, END])


def _has_peer(record: Record) -> bool:
    return any(not r["impl"].startswith("onchip") for r in record["results"])


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
