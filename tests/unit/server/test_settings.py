"""Secrets from variables and from files."""

from pathlib import Path

import pytest

from server.settings import with_password
from shared.environment import secret
from shared.problems import DistransError


def test_a_password_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "password"
    file.write_text("p@ss/word\n")
    monkeypatch.setenv("DISTRANS_DB_PASSWORD_FILE", str(file))
    assert with_password("postgresql://me@host/db") == "postgresql://me:p%40ss%2Fword@host/db"
    assert with_password("postgresql://me:own@host/db") == "postgresql://me:own@host/db"


def test_without_a_file_the_address_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTRANS_DB_PASSWORD_FILE", raising=False)
    assert with_password("postgresql://me@host/db") == "postgresql://me@host/db"


def test_the_variable_comes_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET_FILE", str(tmp_path / "missing"))
    with pytest.raises(DistransError, match="SOME_SECRET_FILE names, cannot be read: No such file"):
        secret("SOME_SECRET")
    monkeypatch.setenv("SOME_SECRET", "told")
    assert secret("SOME_SECRET") == "told"
