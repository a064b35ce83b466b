"""What long work shows on stderr while it runs: a bar by rich on a terminal, else a line now and
then."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

_SECONDS_BETWEEN_LINES = 10.0

# done (of the total), and a word on what comes next
Show = Callable[[float, str], None]


@contextlib.contextmanager
def progress(title: str, total: float) -> Iterator[Show]:
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                Progress,
                TaskProgressColumn,
                TextColumn,
                TimeElapsedColumn,
            )
        except ImportError:
            pass
        else:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}", markup=False),
            )
            with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
                task = bar.add_task(title, total=total, note="")
                yield lambda done, note: bar.update(task, completed=done, note=note)
            return
    last = time.monotonic()

    def show(done: float, note: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            print(f"{title}: {100 * done / total:.0f} %, {note}", file=sys.stderr, flush=True)

    yield show
