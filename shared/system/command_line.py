"""What the three command lines share: `--version`, plain help, tables, and errors without a traceback."""

import errno
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from shared import __version__
from shared.contract.errors import DistransError


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"distrans {__version__}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
]
_ANY_WIDTH = 100_000
HELP_FLAGS = {"help_option_names": ["-h", "--help"]}  # for the context_settings of a program


def examples(*commands: str) -> str:
    """Return the epilog of a command's help: one example per line."""
    return "\n  ".join(["\b\nExamples:", *commands])


def print_table(table: Table) -> None:
    """Print a table, folded to fit a terminal. Tables are not truncated when piped."""
    width = None if sys.stdout.isatty() else _ANY_WIDTH
    Console(markup=False, emoji=False, width=width).print(fold_cells(table))


def fold_cells(table: Table) -> Table:
    """Make the table's cells wrap on a narrow terminal instead of being cut; return the table."""
    for column in table.columns:
        column.overflow = "fold"
    return table


def print_warning(message: str) -> None:
    """Print a warning on stderr."""
    Console(stderr=True, soft_wrap=True).print(f"warning: {message}", style="yellow", markup=False, highlight=False)


@contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """Let SIGINT kill the process until the command installs its own handlers; for commands that start slowly.

    A KeyboardInterrupt can get lost during startup: some libraries catch it while they are being imported.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


_NEXT_STEPS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Free some disk space, then run the command again."),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Change the permissions, or use another path."),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST), "Check the path, or use another one."),
}
_PROGRAMMING_ERRORS = (errno.EBADF, errno.EFAULT, errno.EINVAL, errno.ENOTSOCK)


def run(app: typer.Typer, next_steps: Mapping[str, str] | None = None) -> None:
    """Run a command line; report errors that a person or the system caused as one message on stderr.

    `next_steps` maps error codes to a next step, for errors that do not come with one.
    """
    _use_plain_help(app)
    try:
        app()
    except DistransError as error:
        next_step = error.next_step or (next_steps or {}).get(error.code)
        _end(error.message if next_step is None else f"{error.message} {next_step}", error.exit_code)
    except OSError as error:
        if error.errno in _PROGRAMMING_ERRORS or not str(error):  # an internal timeout has no text
            raise
        _end(f"{_cause(error)}. {_NEXT_STEPS.get(error.errno or 0, 'Fix this, then run the command again.')}")
    except KeyboardInterrupt:
        sys.exit(130)


def _use_plain_help(app: typer.Typer) -> None:
    """Drop Rich's boxes from help: in 80 columns they leave a third of the width to the text, and flags get a type."""
    app.rich_markup_mode = None
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _use_plain_help(group.typer_instance)


def _cause(error: OSError) -> str:
    """Return `str(error)` without the errno."""
    files = " and ".join(str(file) for file in (error.filename, error.filename2) if file is not None)
    return ": ".join(part for part in (files, error.strerror or str(error)) if part)


def _end(message: str, exit_code: int = 1) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(f"error: {message}", style="red", markup=False, highlight=False)
    sys.exit(exit_code)
