"""A command's parameters, read from its signature."""

import inspect
import itertools
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from onchip.errors import InvalidArgument

Command = Callable[..., str]

_TRUTHS = ("true", "false", "yes", "no", "on", "off", "1", "0")


class Failure(Exception):
    """A command that did its work and found a failure: its text is what to print."""


class Parameter(NamedTuple):
    name: str
    type: type  # str, int, float or bool
    default: Any  # inspect.Parameter.empty: required
    help: str
    metavar: str  # what stands for the value in the help
    positional: bool

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def parameters(command: Command) -> list[Parameter]:
    """Each is `name: Annotated[T, "help"]` or `name: Annotated[T | None, "help"] = None`; what
    stands for its value in the help may follow the help, and is the type's name otherwise."""
    hints = typing.get_type_hints(command, include_extras=True)
    found = []
    for parameter in inspect.signature(command).parameters.values():
        annotated, text, *words = typing.get_args(hints[parameter.name])
        choices = [t for t in typing.get_args(annotated) or (annotated,) if t is not type(None)]
        metavar = words[0] if words else choices[0].__name__.upper()
        positional = parameter.kind is not inspect.Parameter.KEYWORD_ONLY
        found.append(
            Parameter(parameter.name, choices[0], parameter.default, text, metavar, positional)
        )
    return found


def refuse_values_of_flags(commands: Sequence[Command], words: Sequence[str]) -> None:
    """`--causal true`, which a parser takes for a word too many."""
    for command in commands:
        if not words or words[0] != command.__name__:
            continue
        flags = {p.flag: p.name for p in parameters(command) if p.type is bool}
        for flag, word in itertools.pairwise(words):
            if flag in flags and word.lower() in _TRUTHS:
                raise InvalidArgument(
                    f"{command.__name__}: {flags[flag]}: got {word!r}, wanted {flag} alone, "
                    "or nothing: it takes no value"
                )


def refuse_unused(command: str, action: str, given: dict[str, tuple[Any, Any]]) -> None:
    """given: what `action` has no use for, as (value, default)."""
    for name, (value, default) in given.items():
        if value != default:
            raise InvalidArgument(
                f"{command}: {name}: got {value!r}, wanted nothing: {action} does not take it"
            )
