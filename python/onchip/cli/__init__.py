"""The command `onchip`, also `python -m onchip`.

What each command takes is written once, as a function's annotated signature (`commands.py`). With
the extra `cli` (typer, rich) those become a typer application, with completion and coloured help;
without it argparse reads the same signatures, so that `onchip doctor` works in the barest
installation.
"""

import os
import sys
from collections.abc import Callable, Sequence

from onchip.cli import commands
from onchip.cli.signature import Command, Failure, refuse_values_of_flags
from onchip.errors import Error


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 1 for a failure, 2 for a wrong call."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        import typer  # noqa: F401  (is the extra there?)
    except ImportError:
        from onchip.cli.plain import run
    else:
        from onchip.cli.coloured import run
    try:
        status = _status_of(run, words)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except OSError as error:
        # Whoever reads no further knows that.
        if not isinstance(error, BrokenPipeError):
            where = error.filename or "standard output"
            print(f"onchip: {where}: {error.strerror or error}", file=sys.stderr)
        if sys.stdout is not None:
            # What could not be written is still in its buffer, and is not to fail again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _status_of(run: Callable[[Sequence[Command], Sequence[str]], int], words: list[str]) -> int:
    try:
        refuse_values_of_flags(commands.COMMANDS, words)
        return run(commands.COMMANDS, words)
    except Failure as failure:
        print(failure, end="")
        return 1
    except Error as error:
        print(f"onchip: {error}", file=sys.stderr)
        return 1
