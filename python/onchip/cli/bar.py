"""The bar that `progress` shows on a terminal; needs rich."""

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from onchip.cli.progress import Show


class _Step(ProgressColumn):
    """What is being done, and for how long."""

    def render(self, task: Task) -> Text:
        note = task.fields["note"]
        seconds = time.monotonic() - task.fields["since"]
        return Text(f"{note} ({seconds:.0f} s)" if note and seconds >= 1 else note)


@contextlib.contextmanager
def bar(title: str, total: float) -> Iterator[Show]:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        _Step(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title, total=total, note="", since=time.monotonic())

        def show(done: float, note: str) -> None:
            shown.update(task, completed=done, note=note, since=time.monotonic())

        yield show
