"""The CPU's campaign: every row below beside PyTorch's CPU attention, one record.

    tools/cpu/run              # or python -m bench.cpu, where onchip and PyTorch are installed

Takes some six minutes of a machine that does nothing else. Finished rows of the same sources are
kept in --state and not measured again, so a run that was stopped goes on where it was (--again
starts over). What the machine reaches at best is measured before and after; the higher counts.
"""

import argparse
import hashlib
import json
import re
import site
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onchip
from onchip import _native
from onchip._text import aligned
from onchip.bench import cases, measure, record, table
from onchip.bench.cases import AttentionCase, Case
from onchip.cli.progress import progress

ROOT = Path(__file__).resolve().parents[1]
OURS = "onchip:cpu"

Result = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """At least; None: nothing is asked."""

    share: float | None = None  # of what the machine reaches at best
    ratio: float | None = None  # to PyTorch
    peak_bytes: int | None = None  # at most


# A figure passes that is 2 % short: so much do runs differ.
_TOLERANCE = 0.98


@dataclass(frozen=True)
class Row:
    name: str
    cases: Sequence[str]
    wanted: Callable[[Case], Wanted]
    implementations: Sequence[str] = (OURS, "torch:sdpa")
    # Each in a process of its own, once: for its memory.
    apart: bool = False

    @property
    def peer(self) -> str | None:
        return next((name for name in self.implementations if name != OURS), None)


# Such that a call takes 0.05 to 2 s. PyTorch cuts one head's queries into equal halves, and causal
# masking leaves one thread most of the work: so one head at the longest, and several as well.
_SHAPES = {
    (64, 1024): ("h16d64", "b4"),
    (64, 4096): ("h16d64", "b1"),
    (64, 16384): ("h1d64", "b1"),
    (128, 1024): ("h8d128", "b4"),
    (128, 4096): ("h8d128", "b1"),
    (128, 16384): ("h1d128", "b1"),
}
_SEVERAL_HEADS = ("h4d64", "h2d128")


def _attention(phase: str, dtype: str, seqlens: Sequence[int]) -> list[str]:
    chosen = [
        f"attention/{phase}/{dtype}/{heads}/{mask}/{batch}s{seqlen}"
        for (_, seqlen), (heads, batch) in _SHAPES.items()
        for mask in ("full", "causal")
        if seqlen in seqlens
    ]
    if 16384 in seqlens:
        chosen += [f"attention/{phase}/{dtype}/{x}/causal/b1s16384" for x in _SEVERAL_HEADS]
    return chosen


def _forward(case: Case) -> Wanted:
    assert isinstance(case, AttentionCase)
    ratio = 1.0
    if case.causal:
        halved = case.seqlen == 1024 or case.num_heads == 1
        ratio = 1.35 if halved else 1.05
    return Wanted(share=0.7 if case.head_dim == 128 else 0.6, ratio=ratio)


def _backward(case: Case) -> Wanted:
    assert isinstance(case, AttentionCase)
    return Wanted(share=0.6, ratio=1.25 if case.causal else 1.0)


_LINEAR = ("simple_gla", "delta_rule", "kda")

ROWS = [
    Row("C-fwd fp32", _attention("fwd", "fp32", (1024, 4096, 16384)), _forward),
    Row("C-bwd fp32", _attention("bwd", "fp32", (1024, 4096)), _backward),
    Row(
        "C-fwd bf16",
        _attention("fwd", "bf16", (1024, 4096, 16384)),
        lambda case: Wanted(share=0.5, ratio=1.3),
    ),
    Row(
        "C-decode",
        [
            f"attention/step/{dtype}/{heads}d128/{cache}/b1s32768"
            for dtype in ("bf16", "fp32")
            for heads in ("h8", "h32k8")
            for cache in ("contiguous", "paged16")
        ],
        lambda case: Wanted(share=0.75),
        (OURS,),
    ),
    Row(
        "C-linear fwd",
        [f"linear/fwd/fp32/h16d128/{name}/b1s4096" for name in _LINEAR],
        lambda case: Wanted(share=0.3, ratio=2.0),
        (OURS, "torch:chunked"),
    ),
    Row(
        "C-linear bwd",
        [f"linear/bwd/fp32/h16d128/{name}/b1s4096" for name in _LINEAR],
        lambda case: Wanted(share=0.25),
        (OURS, "torch:chunked"),
    ),
    Row(
        "C-memory",
        [
            "attention/fwd/fp32/h1d64/causal/b1s65536",
            "attention/fwd/fp32/h1d128/causal/b1s65536",
            "attention/bwd/fp32/h1d64/causal/b1s65536",
        ],
        lambda case: Wanted(peak_bytes=64 << 20),
        (OURS,),
        apart=True,
    ),
]


# ---- what was measured before -------------------------------------------------------------------


def fingerprint(threads: int) -> str:
    """Of the sources, of the library that is installed, and of how it is measured."""
    digest = hashlib.sha256(f"{threads} {record.versions()}\n".encode())
    for command in (["rev-parse", "HEAD"], ["diff", "HEAD"]):
        answer = subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True)
        digest.update(answer.stdout)
    digest.update(Path(str(_native.__file__)).read_bytes())
    return digest.hexdigest()


@dataclass
class State:
    path: Path
    fingerprint: str
    rows: dict[str, Result] = field(default_factory=dict)  # results, skipped
    peaks: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, fingerprint: str, again: bool) -> "State":
        if path.exists() and not again:
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["fingerprint"] == fingerprint:
                return cls(path, fingerprint, kept["rows"], kept["peaks"])
        return cls(path, fingerprint)

    def keep(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        kept = {"fingerprint": self.fingerprint, "rows": self.rows, "peaks": self.peaks}
        new.write_text(json.dumps(kept), encoding="utf-8")
        new.replace(self.path)

    def measure_peaks(self) -> None:
        self.peaks.append(record.ceilings())
        self.keep()

    @property
    def ceilings(self) -> dict[str, float]:
        names = dict.fromkeys(name for peaks in self.peaks for name in peaks)
        return {name: max(peaks[name] for peaks in self.peaks) for name in names}


# ---- measuring ----------------------------------------------------------------------------------


def _measure_row(row: Row, show: measure.Show) -> Result:
    wanted = [(cases.parse(name), row.implementations) for name in row.cases]
    if not row.apart:
        results, skipped = measure.measure_together(wanted, show=show)
        return {"results": results, "skipped": skipped}
    results, skipped = [], []
    for index, (case, names) in enumerate(wanted):
        for name in names:
            show(index / len(wanted), f"{case.name}, {name}")
            try:
                results.append(measure.measure_in_own_process(case, name, budget_s=0.0))
            except measure.Skipped as reason:
                skipped.append({"case": case.name, "impl": name, "reason": str(reason)})
    return {"results": results, "skipped": skipped}


def run(rows: Sequence[Row], state: State) -> None:
    waiting = [row for row in rows if row.name not in state.rows]
    if waiting:
        print("what the machine reaches at best", flush=True)
        state.measure_peaks()
    for row in rows:
        if row not in waiting:
            print(f"{row.name}: measured before", flush=True)
            continue
        print(f"{row.name}: {len(row.cases)} cases", flush=True)
        with progress(row.name, 1.0) as show:
            state.rows[row.name] = _measure_row(row, show)
        state.keep()
    if waiting:
        state.measure_peaks()


def made_record(rows: Sequence[Row], state: State) -> record.Record:
    done = [state.rows[row.name] for row in rows if row.name in state.rows]
    results = [result for row in done for result in row["results"]]
    ceilings = state.ceilings
    return record.build(
        [result | measure.shares(result, ceilings) for result in results],
        [entry for row in done for entry in row["skipped"]],
        ceilings=ceilings,
        **record.checkout(ROOT),
    )


# ---- the report ---------------------------------------------------------------------------------


def _against(value: float | None, wanted: float | None, at_most: bool = False) -> tuple[str, bool]:
    if wanted is None:
        return "" if value is None else f"{value:.2f}", True
    if value is None:
        return f"? (wanted {wanted:.2f})", False
    enough = value <= wanted if at_most else value >= _TOLERANCE * wanted
    return f"{value:.2f} ({'at most' if at_most else 'wanted'} {wanted:.2f})", enough


def verdict(rows: Sequence[Row], made: record.Record) -> tuple[str, bool]:
    """Every case against what its row asks; whether all of them pass."""
    by_case = {(r["case"], r["impl"]): r for r in made["results"]}
    reasons = {(s["case"], s["impl"]): s["reason"] for s in made["skipped"]}
    lines = [["row", "case", "speed", "/ PyTorch", "share of the best", "MiB beyond", ""]]
    passed = True
    for row in rows:
        for name in row.cases:
            ours, peer = by_case.get((name, OURS)), by_case.get((name, row.peer))
            wanted = row.wanted(cases.parse(name))
            if ours is None:
                passed = False
                lines.append([row.name, name, "", "", "", "", reasons.get((name, OURS), "")])
                continue
            ratio = min(peer["samples_ms"]) / min(ours["samples_ms"]) if peer else None
            share = ours.get("bandwidth_use", ours.get("pipe_use"))
            peak = None if ours["peak_bytes"] is None else ours["peak_bytes"] / 2**20
            most = None if wanted.peak_bytes is None else wanted.peak_bytes / 2**20
            checks = [
                _against(ratio, wanted.ratio),
                _against(share, wanted.share),
                _against(peak, most, at_most=True),
            ]
            enough = all(ok for _, ok in checks)
            passed &= enough
            speed = (
                f"{table.bandwidth(ours, made):.1f} GB/s"
                if "bandwidth_use" in ours
                else f"{table.speed(ours, made):.0f} GFLOP/s"
            )
            cells = [text for text, _ in checks]
            lines.append([row.name, name, speed, *cells, "" if enough else "SHORT"])
    return "\n".join(aligned(lines)), passed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [row.name for row in ROWS]
    parser.add_argument("--only", nargs="+", default=names, metavar="ROW", choices=names)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--torch", type=Path, help="a folder of packages that has PyTorch")
    parser.add_argument("--again", action="store_true", help="also what was measured before")
    parser.add_argument("--state", type=Path, default=ROOT / "build/cpu_campaign.json")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/records", help="a folder")
    options = parser.parse_args(arguments)
    if options.torch is not None:
        site.addsitedir(str(options.torch.resolve()))
    measure.set_threads(options.threads)

    rows = [row for row in ROWS if row.name in options.only]
    state = State.read(options.state, fingerprint(options.threads), options.again)
    run(rows, state)
    made = made_record(rows, state)
    model = re.sub(r"[^a-z0-9]+", "-", made["machine"]["cpu"].lower()).strip("-")
    commit = (made["commit"] or "no-commit")[:9]
    path = options.out / f"cpu_{model}_{made['created'][:10]}_{commit}.json"
    record.write(made, path)
    text, passed = verdict(rows, made)
    print(f"\nat best, on {onchip.get_num_threads()} threads: {table.ceilings(made)}\n\n{text}")
    for entry in made["skipped"]:
        if entry["impl"] != OURS:
            print(f"not measured: {entry['impl']}, {entry['case']}: {entry['reason']}")
    remark = table.remark(made)
    if remark:
        passed = False
        print(f"\n{remark}", end="")
    print(f"\nrecord: {path} (python -m bench.render writes the pages)")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
