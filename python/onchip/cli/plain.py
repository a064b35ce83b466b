"""The command line with the standard library alone."""

import argparse
import inspect
from collections.abc import Sequence
from typing import Any

import onchip
from onchip.cli.signature import Command, Parameter, parameters


def _add(parser: argparse.ArgumentParser, parameter: Parameter) -> None:
    # argparse formats help text with %.
    text = parameter.help.replace("%", "%%")
    if parameter.positional:
        many: dict[str, Any] = {}
        if not parameter.required:
            many = {"nargs": "?", "default": parameter.default}
        parser.add_argument(parameter.name, type=parameter.type, help=text, **many)
    elif parameter.type is bool:
        parser.add_argument(parameter.flag, action="store_true", help=text)
    else:
        parser.add_argument(
            parameter.flag,
            type=parameter.type,
            default=parameter.default,
            help=text,
            metavar=parameter.metavar,
        )


def run(commands: Sequence[Command], words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="onchip", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"onchip {onchip.__version__}")
    names = parser.add_subparsers(required=True, metavar="command")
    for command in commands:
        text = inspect.getdoc(command) or ""
        # A sentence does not end where its line does.
        summary = text.partition("\n\n")[0].replace("\n", " ")
        one = names.add_parser(
            command.__name__,
            help=summary.replace("%", "%%"),
            description=text,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for parameter in parameters(command):
            _add(one, parameter)
        one.set_defaults(command=command)
    try:
        found = vars(parser.parse_args(list(words)))
    except SystemExit as stop:  # after --help, or a message about a wrong call
        return stop.code if isinstance(stop.code, int) else 2
    print(found.pop("command")(**found), end="")
    return 0
