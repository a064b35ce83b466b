"""Cases on every backend that is here, and on PyTorch if it is: a table, a record, a plot."""

import itertools
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from onchip._text import nearest
from onchip.bench import cases, measure, plot, record, table
from onchip.bench.implementations import IMPLEMENTATIONS, absent
from onchip.cli.progress import progress
from onchip.cli.settings import refuse_wrong_settings
from onchip.cli.signature import Failure
from onchip.errors import InvalidArgument

_DEFAULTS = ("fwd", "fp32", "64", "causal", "1024,4096")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _parse(name: str, where: str = "") -> cases.Case:
    try:
        return cases.parse(name)
    except ValueError as error:
        raise InvalidArgument(f"bench: {where}{error}") from None


def _from_file(path: Path) -> list[cases.Case]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"bench: file: {path}: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        name = line.partition("#")[0].strip()
        if name:
            found.append(_parse(name, f"{path}, line {number}: "))
    if not found:
        raise InvalidArgument(f"bench: file: {path} has no case")
    return found


def _from_flags(flags: Sequence[str | None], heads: str | None, batch: int | None) -> list[Any]:
    """Every combination; `flags` are phase, dtype, head_dim, mask, seqlen."""
    lists = [_words(given or default) for given, default in zip(flags, _DEFAULTS, strict=True)]
    heads = f"h{heads}" if heads else ""
    rows = "" if batch is None else f"b{batch}"
    return [
        _parse(f"attention/{phase}/{dtype}/{heads}d{dim}/{mask}/{rows}s{seqlen}")
        for phase, dtype, dim, mask, seqlen in itertools.product(*lists)
    ]


def _here() -> tuple[list[str], dict[str, str]]:
    """The implementations, and why each other one is not here. The plain formula is neither: it is
    there to be asked for."""
    refuse_wrong_settings("bench")
    reasons = {name: absent(name) for name in IMPLEMENTATIONS if name != "numpy:plain"}
    not_here = {name: reason for name, reason in reasons.items() if reason is not None}
    return [name for name in reasons if name not in not_here], not_here


def _fits(name: str, case: cases.Case) -> bool:
    if isinstance(case, cases.LinearCase):
        return not name.startswith("torch:sdpa")
    return name != "torch:chunked"


def _implementations(impl: str) -> list[str]:
    names = _words(impl)
    for name in names:
        if name not in IMPLEMENTATIONS:
            raise InvalidArgument(
                f"bench: impl: got {name!r}, wanted some of {', '.join(IMPLEMENTATIONS)}"
                + nearest(name, IMPLEMENTATIONS)
            )
    return names


def _check_ending(name: str, path: str | None, wanted: str) -> None:
    if path is not None and not re.fullmatch(rf".+\.({wanted})", path):
        endings = wanted.replace("|", ", .")
        raise InvalidArgument(f"bench: {name}: got {path!r}, wanted a file name with .{endings}")
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise InvalidArgument(f"bench: {name}: got {path!r}, wanted a folder that exists")
    if path is not None and Path(path).is_dir():
        raise InvalidArgument(f"bench: {name}: got {path!r}, a folder, wanted a file name")


def run_bench(
    *,
    names: str | None,
    file: str | None,
    flags: Sequence[str | None],
    heads: str | None,
    batch: int | None,
    impl: str | None,
    rounds: int,
    threads: int | None,
    limit: float,
    seed: int,
    out: str | None,
    plot_path: str | None,
) -> str:
    if rounds < measure.MIN_ROUNDS:
        raise InvalidArgument(f"bench: rounds: got {rounds}, wanted {measure.MIN_ROUNDS} at least")
    if not limit > 0:
        raise InvalidArgument(f"bench: limit: got {limit}, wanted more than 0")
    if seed < 0:
        raise InvalidArgument(f"bench: seed: got {seed}, wanted 0 or more")
    _check_ending("out", out, "json")
    _check_ending("plot", plot_path, "png|svg|pdf")
    if plot_path is not None and find_spec("matplotlib") is None:
        raise InvalidArgument(f"bench: plot: got {plot_path!r}, which needs matplotlib: install it")
    ways = [names, file, next((x for x in (*flags, heads, batch) if x is not None), None)]
    if sum(way is not None for way in ways) > 1:
        raise InvalidArgument(
            "bench: got cases in more than one way, wanted names, or --file, or the flags"
        )
    if names is not None:
        wanted = [_parse(name) for name in _words(names)]
    elif file is not None:
        wanted = _from_file(Path(file))
    else:
        wanted = _from_flags(flags, heads, batch)
    wanted = list({case.name: case for case in wanted}.values())
    pairs: list[tuple[cases.Case, list[str]]]
    not_here: dict[str, str] = {}
    if impl is None:
        here, not_here = _here()
        pairs = [(case, [name for name in here if _fits(name, case)]) for case in wanted]
    else:
        names_given = _implementations(impl)
        pairs = [(case, names_given) for case in wanted]

    # Refused before anything is measured; 0: the start value.
    measure.set_threads(0 if threads is None else threads)
    with progress("bench", 1.0) as show:
        show(0.0, "what the machine reaches at best")
        peaks = record.ceilings()
        results, skipped = measure.measure_together(
            pairs,
            rounds=rounds,
            seed=seed,
            limit_s=limit,
            show=show,
        )
    results = [result | measure.shares(result, peaks) for result in results]
    known: dict[str, Any] = {"ceilings": peaks}
    if any(result["backend"].startswith("cuda") for result in results):
        known["machine"] = record.machine() | record.gpu_facts()
    made = record.build(results, skipped, **known)
    return _report(made, not_here, out, plot_path)


def _report(
    made: record.Record, not_here: dict[str, str], out: str | None, plot_path: str | None
) -> str:
    machine = made["machine"]
    text = f"{machine['gpu'] or machine['cpu']}, {machine['threads']} threads\n"
    text += f"at best: {table.ceilings(made)}\n\n"
    if made["results"]:
        text += table.text_table(made) + "\n" + table.remark(made)
    for entry in made["skipped"]:
        text += f"not measured: {entry['impl']}, {entry['case']}: {entry['reason']}\n"
    for reason in dict.fromkeys(not_here.values()):
        names = ", ".join(name for name, why in not_here.items() if why == reason)
        text += f"not here: {names}: {reason}\n"
    # What was measured is shown also where a file cannot be written.
    failures = []
    if out is not None:
        try:
            record.write(made, Path(out))
            text += f"record: {out}\n"
        except OSError as error:
            failures.append(f"no record: {error}\n")
    if plot_path is not None and made["results"]:
        try:
            plot.draw(made, Path(plot_path))
            text += f"plot: {plot_path}\n"
        except OSError as error:
            failures.append(f"no plot: {error}\n")
    if failures:
        raise Failure(text + "".join(failures))
    return text
