"""The command `onchip`, also `python -m onchip`.

What each command takes is written once, as a function's annotated signature (`commands.py`). With
the extra `cli` (typer, rich) those become a typer application, with completion and coloured help;
without it argparse reads the same signatures, so that `onchip doctor` works in the barest
installation.
"""

import sys
from collections.abc import Sequence

from onchip.cli import commands
from onchip.cli.signature import Failure
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
        return run(commands.COMMANDS, words)
    except Failure as failure:
        print(failure, end="")
        return 1
    except Error as error:
        print(f"onchip: {error}", file=sys.stderr)
        return 1
