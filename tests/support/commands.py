"""Commands of a program, called in this process: a process for each would import everything each time."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


def server_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """The entry point of `distrans-server`."""
    from server import __main__ as program

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["distrans-server", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            program.main()
        printed = capsys.readouterr()
        return Outcome(int(end.value.code or 0), printed.out, printed.err)

    return run
