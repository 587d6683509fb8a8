"""Secrets from variables, files, pipes and a prompt."""

import io
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from shared.contract.errors import DistransError
from shared.system.secrets import ask_secret, read_secret, secret


def test_a_variable_takes_precedence_over_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(" from-a-file\n")
    monkeypatch.setenv("SOME_TOKEN_FILE", str(tmp_path / "token"))
    assert secret("SOME_TOKEN") == "from-a-file"
    monkeypatch.setenv("SOME_TOKEN", "from-a-variable")
    assert secret("SOME_TOKEN") == "from-a-variable"
    assert secret("ANOTHER_TOKEN") is None


def test_an_unreadable_file_is_named_with_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOME_TOKEN_FILE", str(tmp_path / "gone"))
    with pytest.raises(DistransError, match=r"gone \(SOME_TOKEN_FILE\) cannot be read: No such file"):
        secret("SOME_TOKEN")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(DistransError, match="it is not text"):
        read_secret(tmp_path / "bytes")


def test_a_dash_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("piped\n"))
    assert read_secret(Path("-")) == "piped"
    assert ask_secret("Token") is None


def test_the_prompt_does_not_echo_the_secret() -> None:
    terminal, its_end = pty.openpty()
    code = "from shared.system.secrets import ask_secret; print(ask_secret('Token') == 'typed-in')"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=its_end,
        stdout=subprocess.PIPE,
        stderr=its_end,
        start_new_session=True,
    ) as process:
        os.close(its_end)
        assert process.stdout is not None
        shown = b""
        while b"Token: " not in shown:  # echo is off before the prompt appears
            shown += os.read(terminal, 1000)
        os.write(terminal, b"typed-in\n")
        assert process.stdout.read() == b"True\n"
    with suppress(OSError):  # the other end is closed and nothing is left
        shown += os.read(terminal, 1000)
    os.close(terminal)
    assert b"typed-in" not in shown
