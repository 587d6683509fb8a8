"""Fixtures for tests that run `distrans-server` commands."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import server_command
from support.operator_commands import CRASH_SIGNS, Command, Refuse, Succeed, pets_federation

from server.service.context import Context


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Command]:
    """Run a command in this process, in an empty folder: separate processes would load torch each time."""
    root, before = logging.getLogger(), dict(os.environ)
    handlers, level = root.handlers[:], root.level
    for name in list(os.environ):
        if name.startswith("DISTRANS_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    yield server_command(monkeypatch, capsys)
    root.handlers[:] = handlers
    root.setLevel(level)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def succeed(command: Command) -> Succeed:
    """Run a command that must succeed; return what it prints."""

    def run(*arguments: object) -> str:
        outcome = command(*arguments)
        assert (outcome.code, outcome.err) == (0, "")
        return outcome.out

    return run


@pytest.fixture
def refuses(command: Command) -> Refuse:
    """Run a command that must fail without a traceback; return its error message."""

    def run(*arguments: object) -> str:
        outcome = command(*arguments)
        assert (outcome.code, outcome.out) == (1, "")
        assert outcome.err.startswith("error: ")
        assert not any(sign in outcome.err for sign in CRASH_SIGNS)
        return outcome.err.removeprefix("error: ").strip()

    return run


@pytest.fixture
def pets(succeed: Succeed, tmp_path: Path) -> Iterator[Context]:
    """Create a federation in the default data folder."""
    yield from pets_federation(succeed, tmp_path)
