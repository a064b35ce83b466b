#!/usr/bin/env python3
"""Runs a command under compute-sanitizer's racecheck and judges its reports.

    racecheck.py --out FILE --explained FILE [--kernel-name FILTER] -- command...

FILE gets everything that was printed. Reports are grouped by the two lines of source they name,
which the command's kernels have to be compiled with (ONCHIP_TOOLS_LINE_INFO=1), and compared with
the explained pairs: a pair that is not among them fails, and so does a report that is cut off.
"""

import argparse
import collections
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src/gpu"
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"

_BEGIN = re.compile(r"Race reported between (\w+) access at (.+)$")
_OTHER = re.compile(r"^=*\s*and (\w+) access at (.+) \[(\d+) hazards?\]\s*$")
_SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")
_LINE = re.compile(r" in (?:.*/)?([\w.]+):(\d+)")


class Malformed(Exception):
    pass


# ---- reports


@dataclass(frozen=True, order=True)
class Access:
    kind: str  # "read" or "write"
    place: str  # "file: line of source", or the place as the sanitizer has it


@dataclass(frozen=True)
class Hazards:
    pair: frozenset  # of its accesses: one, where they are alike
    count: int


def parse(text):
    """([the hazards of each report], how many reports the sanitizer says it has displayed)."""
    reports, first, displayed = [], None, None
    for line in text.splitlines():
        if found := _BEGIN.search(line):
            first = Access(found[1].lower(), _place(found[2].strip()))
            reports.append([])
        elif (found := _OTHER.match(line)) and first is not None:
            other = Access(found[1].lower(), _place(found[2].strip()))
            reports[-1].append(Hazards(frozenset((first, other)), int(found[3])))
        else:
            first = None
            if found := _SUMMARY.search(line):
                displayed = int(found[1])
    return reports, displayed


def _place(where):
    found = _LINE.search(where)
    if found is None:
        return where
    name, number = found[1], int(found[2])
    paths = sorted(SOURCES.rglob(name))
    lines = paths[0].read_text().splitlines() if len(paths) == 1 else []
    if not 0 < number <= len(lines):
        return f"{name}:{number}"
    return f"{name}: {lines[number - 1].strip()}"


# ---- what is explained


def explained(text):
    """Pairs of accesses with their reasons. An entry: an access, those that it is reported with,
    and, indented, why none of them is a race. Empty lines lie between entries; "#" is a comment."""
    pairs = {}
    entries = re.split(r"\n\s*\n", re.sub(r"^#.*\n?", "", text, flags=re.MULTILINE).strip("\n"))
    for entry in filter(str.strip, entries):
        lines = entry.splitlines()
        named = [line for line in lines if not line.startswith(" ")]
        reason = " ".join(line.strip() for line in lines if line.startswith(" "))
        accesses = []
        for line in named:
            kind, _, place = line.partition(" ")
            if kind not in ("read", "write") or not place:
                raise Malformed(f"neither an access nor indented: {line!r}")
            accesses.append(Access(kind, place.strip()))
        if len(accesses) < 2 or not reason:
            raise Malformed(f"wanted two accesses or more and a reason: {entry!r}")
        for other in accesses[1:]:
            pairs[frozenset((accesses[0], other))] = reason
    return pairs


# ---- the judgement


def judge(text, code, reasons):
    """(what is wrong, lines for a table, one line for a summary)."""
    reports, displayed = parse(text)
    counts, seen = collections.Counter(), collections.Counter()
    for report in reports:
        for hazards in report:
            counts[hazards.pair] += hazards.count
        seen.update({hazards.pair for hazards in report})
    problems = []
    if code != 0:
        problems.append(f"the program ended with {code}")
    if displayed is None:
        problems.append("there is no RACECHECK SUMMARY")
    elif displayed != len(reports):
        problems.append(f"{displayed} reports were counted, {len(reports)} are here")
    if not all(reports):
        problems.append("a report names one access only")
    table = []
    if counts:
        table.append(f"{'hazards':>8} {'reports':>8}  explained")
    new = 0
    for pair, count in counts.most_common():
        new += pair not in reasons
        word = "yes" if pair in reasons else "NO"
        accesses = sorted(pair, reverse=True)  # writes first
        for index, access in enumerate(accesses if len(pair) == 2 else accesses * 2):
            begin = f"{count:8} {seen[pair]:8}  {word:<9}" if index == 0 else " " * 28
            table.append(f"{begin}  {access.kind:<5} {access.place}")
    if new:
        problems.append(f"{new} pairs are not explained")
    summary = f"{len(reports)} reports of {len(counts)} pairs"
    return problems, table, f"{summary}: {'; '.join(problems)}" if problems else summary


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--explained", type=Path, required=True)
    parser.add_argument("--kernel-name", help="compute-sanitizer's filter")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    reasons = explained(options.explained.read_text())
    only = ["--kernel-name", options.kernel_name] if options.kernel_name else []
    # Its own limit would leave reports out.
    sanitizer = [SANITIZER, "--tool", "racecheck", "--print-limit", "1000000", *only]
    with options.out.open("w") as out:
        ran = subprocess.run([*sanitizer, *command], stdout=out, stderr=subprocess.STDOUT)
    text = options.out.read_text(errors="replace")
    problems, table, summary = judge(text, ran.returncode, reasons)
    if ran.returncode != 0:
        print("\n".join(line for line in text.splitlines()[-30:] if not line.startswith("===")))
    print("\n".join([*table, f"racecheck: {summary}"]))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
