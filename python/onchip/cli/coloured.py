"""The command line as a typer application; needs the extra `cli`."""

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

import onchip
from onchip.cli.signature import Command, Parameter, parameters


def _as_typer(parameter: Parameter) -> inspect.Parameter:
    wanted: Any = parameter.type
    if parameter.default is None:
        wanted = wanted | None
    how: Any
    # Brackets of a text are its own, no markup.
    text = escape(parameter.help)
    if parameter.positional:
        how = typer.Argument(help=text)
    else:
        metavar = None if parameter.type is bool else parameter.metavar
        how = typer.Option(parameter.flag, help=text, metavar=metavar, show_default=False)
    return inspect.Parameter(
        parameter.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=parameter.default,
        annotation=Annotated[wanted, how],
    )


def _wrapped(command: Command) -> Callable[..., None]:
    def call(**values: Any) -> None:
        Console(soft_wrap=True, markup=False).print(command(**values), end="")

    made = [_as_typer(parameter) for parameter in parameters(command)]
    # A line of a paragraph is not to end where it does in the source.
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    call.__doc__ = escape("\n\n".join(text.replace("\n", " ") for text in paragraphs))
    call.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in made}
    return call


def run(commands: Sequence[Command], words: Sequence[str]) -> int:
    app = typer.Typer(name="onchip", no_args_is_help=True, pretty_exceptions_enable=False)

    def show_version(wanted: bool) -> None:
        if wanted:
            print(f"onchip {onchip.__version__}")
            raise typer.Exit

    @app.callback()
    def about(
        version: Annotated[
            bool,
            typer.Option("--version", callback=show_version, is_eager=True, help="Show it."),
        ] = False,
    ) -> None:
        """Exact and linear attention whose intermediates stay on the chip."""

    for command in commands:
        app.command(command.__name__)(_wrapped(command))
    try:
        app(args=list(words), prog_name="onchip")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    return 0
