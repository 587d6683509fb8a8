"""Secrets from environment variables and files."""

from pathlib import Path

import pytest

from server.service.settings import with_password
from shared.contract.errors import DistransError
from shared.system.secrets import secret


def test_database_password_is_read_from_its_file_and_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "password"
    file.write_text("p@ss/word\n")
    monkeypatch.setenv("DISTRANS_DB_PASSWORD_FILE", str(file))
    assert with_password("postgresql://me@host/db") == "postgresql://me:p%40ss%2Fword@host/db"
    assert with_password("postgresql://me:own@host/db") == "postgresql://me:own@host/db"


def test_database_url_is_unchanged_without_a_password_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTRANS_DB_PASSWORD_FILE", raising=False)
    assert with_password("postgresql://me@host/db") == "postgresql://me@host/db"


def test_secret_variable_takes_precedence_over_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET_FILE", str(tmp_path / "missing"))
    with pytest.raises(DistransError, match=r"\(SOME_SECRET_FILE\) cannot be read: No such file"):
        secret("SOME_SECRET")
    monkeypatch.setenv("SOME_SECRET", "told")
    assert secret("SOME_SECRET") == "told"
