"""What the three command lines have in common: `--version`, and errors without a traceback."""

import sys
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console

from shared import __version__
from shared.problems import DistransError


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"distrans {__version__}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
]


def run(app: typer.Typer, next_steps: Mapping[str, str] | None = None) -> None:
    """Run a command line; an error that a person can cause is one message on stderr and exit code 1.

    `next_steps` says, by code, what to do about errors that leave it to the program.
    """
    try:
        app()
    except DistransError as error:
        next_step = error.next_step or (next_steps or {}).get(error.code)
        text = f"error: {error.message}" if next_step is None else f"error: {error.message} {next_step}"
        Console(stderr=True, soft_wrap=True).print(text, style="red", markup=False, highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
