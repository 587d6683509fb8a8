"""Command lines run inside the test process, which saves every command the time to import everything."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


def server_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Return a function that runs `distrans-server` with the given arguments."""
    from server import __main__ as program

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["distrans-server", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            program.main()
        printed = capsys.readouterr()
        return Outcome(int(end.value.code or 0), printed.out, printed.err)

    return run
