"""What long work shows on stderr while it runs, also inside a long step: a bar by rich on a
terminal, else a line now and then. Both say for how long the step has run."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

_SECONDS_BETWEEN_LINES = 10.0

# done (of the total), and a word on what comes next
Show = Callable[[float, str], None]


@contextlib.contextmanager
def progress(title: str, total: float) -> Iterator[Show]:
    if sys.stderr.isatty():
        try:
            from onchip.cli.bar import bar
        except ImportError:
            pass
        else:
            with bar(title, total) as show:
                yield show
            return
    with _lines(title, total) as show:
        yield show


@contextlib.contextmanager
def _lines(title: str, total: float) -> Iterator[Show]:
    ended = threading.Event()
    # What came last, and when; replaced as a whole, since another thread reads it.
    latest: tuple[float, str, float] | None = None

    def show(done: float, note: str) -> None:
        nonlocal latest
        latest = (done, note, time.monotonic())

    def write() -> None:
        while not ended.wait(_SECONDS_BETWEEN_LINES):
            if latest is None:
                continue
            done, note, since = latest
            seconds = time.monotonic() - since
            print(
                f"{title}: {100 * done / total:.0f} %, {note} ({seconds:.0f} s)",
                file=sys.stderr,
                flush=True,
            )

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        yield show
    finally:
        ended.set()
        writer.join()
