"""What the three command lines have in common: `--version`, and errors without a traceback."""

import errno
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, NoReturn

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


@contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """Let SIGINT end the process at once, until the command sets handlers of its own; for commands that start slowly.

    Python's KeyboardInterrupt can get lost while they start: some libraries catch it as they are imported.
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
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Make room on the disk, then run it again."),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Name another place, or change its permissions."),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST), "Check the path, or name another."),
}
_FAULTS_OF_PROGRAMS = (errno.EBADF, errno.EFAULT, errno.EINVAL, errno.ENOTSOCK)


def run(app: typer.Typer, next_steps: Mapping[str, str] | None = None) -> None:
    """Run a command line; an error that a person or the system can cause is one message on stderr and its exit code.

    `next_steps` says, by code, what to do about errors that leave it to the program.
    """
    try:
        app()
    except DistransError as error:
        next_step = error.next_step or (next_steps or {}).get(error.code)
        _end(error.message if next_step is None else f"{error.message} {next_step}", error.exit_code)
    except OSError as error:
        if error.errno in _FAULTS_OF_PROGRAMS or not str(error):  # such as a timeout inside the program
            raise
        _end(f"{_cause(error)}. {_NEXT_STEPS.get(error.errno or 0, 'Fix that, then run it again.')}")
    except KeyboardInterrupt:
        sys.exit(130)


def _cause(error: OSError) -> str:
    """Without the number that stands before it in `str(error)`."""
    files = " and ".join(str(file) for file in (error.filename, error.filename2) if file is not None)
    return ": ".join(part for part in (files, error.strerror or str(error)) if part)


def _end(words: str, exit_code: int = 1) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(f"error: {words}", style="red", markup=False, highlight=False)
    sys.exit(exit_code)
