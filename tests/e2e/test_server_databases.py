"""`distrans-server` and its database: created only on request, upgraded only on request, named in every error."""

import json
import shlex
import stat
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import text
from support.databases import new_postgres_database
from support.operator_commands import PETS_PLAN, Command, Refuse, Succeed

from server.commands.target import upgrade_command
from server.store import schema
from server.store.database import Database


class TestDatabase:
    def test_upgrade_migrates_once_and_is_idempotent(self, succeed: Succeed, empty_db_url: str) -> None:
        (head,) = ScriptDirectory.from_config(schema._config()).get_heads()
        assert succeed("db", "upgrade", "--db", empty_db_url) == f"Upgraded the schema: empty → {head}.\n"
        assert succeed("db", "upgrade", "--db", empty_db_url) == f"The schema is already at {head}.\n"
        assert json.loads(succeed("federation", "list", "--json", "--db", empty_db_url)) == []

    def test_backup_can_be_opened_and_is_never_overwritten(
        self, succeed: Succeed, refuses: Refuse, tmp_path: Path
    ) -> None:
        succeed("db", "upgrade")
        assert succeed("db", "backup", "copy.db").startswith("Wrote copy.db (")
        assert json.loads(succeed("federation", "list", "--json", "--db", f"sqlite:///{tmp_path / 'copy.db'}")) == []
        assert refuses("db", "backup", "copy.db") == "copy.db already exists. Choose a new file name."

    def test_the_url_can_come_from_the_environment(
        self, succeed: Succeed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("DISTRANS_DB", f"sqlite:///{tmp_path / 'elsewhere.db'}")
        succeed("db", "upgrade")
        assert (tmp_path / "elsewhere.db").exists()
        assert not (tmp_path / "distrans-data").exists()

    def test_data_folder_is_readable_by_its_owner_only(self, succeed: Succeed, tmp_path: Path) -> None:
        succeed("db", "upgrade")
        assert stat.S_IMODE((tmp_path / "distrans-data").stat().st_mode) == 0o700

    def test_missing_database_is_never_created_by_reading_commands(self, refuses: Refuse, tmp_path: Path) -> None:
        """A command in the wrong folder leaves nothing behind, and explains how to name the right one."""
        (tmp_path / "plan.toml").write_text(PETS_PLAN)
        advice = "Set --data-dir or --db; `distrans-server serve` creates a new database."
        for words in (
            *(("federation", "list"), ("federation", "show", "pets"), ("federation", "create", "plan.toml")),
            *(
                ("invite", "create", "pets"),
                ("client", "list", "pets"),
                ("audit", "list"),
                ("audit", "export", "x.csv"),
            ),
        ):
            assert refuses(*words) == f"No database found at distrans-data/distrans.db. {advice}"
        assert refuses("federation", "list", "--data-dir", "else where").startswith(
            "No database found at else where/distrans.db."
        )
        assert refuses("federation", "list", "--db", "sqlite:///x.db").startswith("No database found at x.db.")
        assert [path.name for path in tmp_path.iterdir()] == ["plan.toml"]

    def test_an_empty_database_is_refused(self, refuses: Refuse, empty_db_url: str) -> None:
        if empty_db_url.startswith("sqlite"):
            Path(empty_db_url.removeprefix("sqlite:///")).touch()
        for words in (("federation", "list"), ("invite", "create", "pets"), ("audit", "list")):
            message = refuses(*words, "--db", empty_db_url)
            assert message == f"The database is empty. Run: distrans-server db upgrade --db {shlex.quote(empty_db_url)}"

    def test_an_older_schema_is_refused(self, refuses: Refuse, db_url: str) -> None:
        """The error names the command that upgrades it."""
        scripts = ScriptDirectory.from_config(schema._config())
        for script in scripts.walk_revisions():
            if script.revision != scripts.get_current_head():
                stamp(db_url, script.revision)
                message = refuses("federation", "list", "--db", db_url)
                assert f"has schema {script.revision}, older than" in message
                assert message.endswith(f"Run: distrans-server db upgrade --db {shlex.quote(db_url)}")

    def test_the_suggested_upgrade_command_names_the_same_database(
        self, command: Command, refuses: Refuse, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """It can be pasted, has no password, and leaves out what is set in the environment."""
        (tmp_path / "my data").mkdir()
        (tmp_path / "my data" / "distrans.db").touch()
        advice = "The database is empty. Run: distrans-server db upgrade"
        assert refuses("federation", "list", "--data-dir", "my data") == f"{advice} --data-dir 'my data'"
        message = refuses("federation", "list", "--db", "sqlite:///my data/distrans.db")
        assert message == f"{advice} --db 'sqlite:///my data/distrans.db'"
        monkeypatch.setenv("DISTRANS_DATA_DIR", "my data")
        assert refuses("federation", "list") == advice
        monkeypatch.setenv("DISTRANS_DB", "sqlite:///my data/distrans.db")
        assert refuses("federation", "list") == advice
        assert command("db", "upgrade").code == 0
        assert command("federation", "list").code == 0
        hidden = upgrade_command("postgresql://me:secret@host/name", Path("distrans-data"))
        assert hidden == "distrans-server db upgrade --db 'postgresql://me:***@host/name'"

    @pytest.mark.parametrize(
        "words", [("federation", "list"), ("db", "upgrade"), ("serve", "--port", "0")], ids=" ".join
    )
    def test_a_newer_schema_is_refused(self, refuses: Refuse, db_url: str, words: tuple[str, ...]) -> None:
        stamp(db_url, "9999")
        assert refuses(*words, "--db", db_url) == (
            "The database has schema 9999, which is newer than this program. "
            "Install the newer release: pip install --upgrade distrans"
        )

    def test_serve_never_upgrades_a_postgresql_database(self, refuses: Refuse, postgres_url: str) -> None:
        url = new_postgres_database(postgres_url)
        assert refuses("serve", "--port", "0", "--db", url) == (
            f"The database is empty. Run: distrans-server db upgrade --db {shlex.quote(url)}"
        )

    @pytest.mark.parametrize(
        ("address", "words"),
        [
            ("nonsense", "Invalid database URL."),
            ("mysql://host/name", "Unsupported database 'mysql'. Use SQLite or PostgreSQL."),
            ("sqlite://", "SQLite needs a file."),
            ("sqlite:///:memory:", "SQLite needs a file."),
            ("sqlite:///.", "Cannot reach the database: unable to open database file."),
            ("sqlite:///text.txt", "Cannot reach the database: file is not a database."),
            ("postgresql://host:port/name", "Invalid database URL."),
            ("postgresql://127.0.0.1:1/name", "Cannot reach the database: connection"),
            ("postgresql+asyncpg://127.0.0.1:1/name", "Cannot reach the database: connection"),
        ],
    )
    def test_unusable_database_urls_are_explained(
        self, refuses: Refuse, tmp_path: Path, address: str, words: str
    ) -> None:
        (tmp_path / "text.txt").write_text("This is a text file of some length, and not a database.")
        for group in (("db", "upgrade"), ("federation", "list")):
            assert refuses(*group, "--db", address).startswith(words)

    def test_a_folder_that_cannot_be_created_is_named(self, refuses: Refuse, tmp_path: Path) -> None:
        (tmp_path / "text.txt").touch()
        message = refuses("db", "upgrade", "--db", "sqlite:///text.txt/x.db")
        assert message.startswith("Cannot create folder text.txt: File exists.")


def stamp(db_url: str, revision: str) -> None:
    """Make the database look like one of another release."""
    db = Database(db_url)
    with db.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})
    db.close()
