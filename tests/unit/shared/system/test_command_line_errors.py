"""Errors of the three command lines, without a traceback."""

import errno
import os
import sys

import pytest
import typer

from shared.system.command_line import run as run_program


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "a: No space left on device. Free some disk space, then run the command again."),
        (errno.EROFS, "a: Read-only file system. Change the permissions, or use another path."),
        (errno.ENOLCK, "a: No locks available. Fix this, then run the command again."),
    ],
)
def test_system_error_says_what_to_do(number: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome_of(OSError(number, os.strerror(number), "a")) == 1
    assert capsys.readouterr().err == f"error: {words}\n"


def test_programming_errors_are_not_hidden() -> None:
    for error in (OSError(errno.EBADF, "Bad file descriptor"), KeyError("round")):
        with pytest.raises(type(error)):
            outcome_of(error)


def outcome_of(error: Exception) -> object:
    """Return the exit code of a program that raises this error."""
    program = typer.Typer(pretty_exceptions_enable=False)

    @program.command()
    def fail() -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program"])
        with pytest.raises(SystemExit) as ended:
            run_program(program)
    return ended.value.code
