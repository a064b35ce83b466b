"""How both parts of the demo write numbers, show progress and report a failed check."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from onchip.bench.memory import RESOLUTION_BYTES


class CheckFailed(Exception):
    """A result of onchip is not what it has to be."""


def ms_text(ms: float) -> str:
    digits = 2 if ms < 10 else 1 if ms < 100 else 0
    return f"{ms:,.{digits}f} ms"


def bytes_text(count: int | None) -> str:
    if count is None:
        return "not measurable here"
    if count < RESOLUTION_BYTES:
        return f"< {RESOLUTION_BYTES / 2**20:.1f} MiB"
    return f"{count / 2**20:,.1f} MiB"


@contextmanager
def progress(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar; gives the function to call after every step. Without a terminal: its end, once."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
