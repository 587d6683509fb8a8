"""The schema and its migrations, on real databases."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import inspect, select, text
from support.desk import Desk

from server.store import blobs, schema
from server.store.database import Database, DatabaseError
from server.store.tables import Federation, Model, Participant, Round


@pytest.fixture
def empty_db(empty_db_url: str) -> Iterator[Database]:
    database = Database(empty_db_url)
    yield database
    database.close()


def revision_of(db: Database, revision: str) -> None:
    with db.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})


def downgrade(db: Database, revision: str) -> None:
    config = schema._config()
    with db.migration() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, revision)


class TestSchema:
    def test_of_an_empty_database_is_refused_with_the_command(self, empty_db: Database) -> None:
        with pytest.raises(DatabaseError) as caught:
            schema.require_current(empty_db)
        assert str(caught.value) == "The database is empty. Run: distrans-server db upgrade"
        before, after = schema.upgrade(empty_db)
        assert (before, after) == (None, schema.current_version(empty_db))
        schema.require_current(empty_db)
        assert schema.upgrade(empty_db) == (after, after), "twice is once"

    def test_of_a_newer_release_is_refused(self, empty_db: Database) -> None:
        schema.upgrade(empty_db)
        revision_of(empty_db, "9999")
        for step in (schema.require_current, schema.upgrade):
            with pytest.raises(DatabaseError, match="schema 9999, which is newer than this program") as caught:
                step(empty_db)
            assert caught.value.next_step == "Install the newer release: pip install --upgrade distrans"

    def test_of_an_older_release_is_refused_with_the_command(
        self, empty_db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A release with one more migration, like the next one."""
        schema.upgrade(empty_db)
        folder = tmp_path / "migrations"
        shutil.copytree(str(schema._config().get_main_option("script_location")), folder)
        head = schema.current_version(empty_db)
        (folder / "versions" / "9999_next.py").write_text(
            f'from alembic import op\nrevision = "9999"\ndown_revision = "{head}"\n'
            'def upgrade():\n    op.execute("CREATE TABLE next_release (id INTEGER)")\n'
        )
        config = Config()
        config.set_main_option("script_location", str(folder))
        monkeypatch.setattr(schema, "_config", lambda: config)
        with pytest.raises(DatabaseError) as caught:
            schema.require_current(empty_db)
        assert str(caught.value) == f"The database has schema {head}, older than 9999. Run: distrans-server db upgrade"
        assert schema.upgrade(empty_db) == (head, "9999")
        schema.require_current(empty_db)

    def test_of_the_migrations_is_the_schema_of_the_tables(self, empty_db: Database) -> None:
        """A table changed without a migration shows up here."""
        schema.upgrade(empty_db)
        config = schema._config()
        with empty_db.engine.connect() as connection:
            config.attributes["connection"] = connection
            command.check(config)

    def test_names_leave_the_reasons_of_an_older_release(self, empty_db: Database) -> None:
        """Clients can read reasons, but must not see the names the first release wrote into them."""
        config = schema._config()
        with empty_db.engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "0001")
            for name, reason in (("a", "round 1 failed: too few; missing: north, south"), ("b", "tea")):
                connection.execute(
                    text(
                        "INSERT INTO federations (name, plan, state, reason, created_at, state_since, completed_rounds,"
                        " stale_rounds, version) VALUES (:name, '', 'paused', :reason, 0, 0, 0, 0, 0)"
                    ),
                    {"name": name, "reason": reason},
                )
        schema.upgrade(empty_db)
        with empty_db.read() as session:
            rows = session.execute(select(Federation).order_by(Federation.name)).scalars()
            found = [(row.reason, row.reason_detail) for row in rows]
        assert found == [("round 1 failed: too few", "missing: north, south"), ("tea", "")]

    def test_has_an_index_for_every_reference_to_a_blob(self, empty_db: Database) -> None:
        """Without one, deleting a blob scans every table that could refer to it."""
        schema.upgrade(empty_db)
        found = inspect(empty_db.engine)
        missing = {
            (table, key["constrained_columns"][0])
            for table in found.get_table_names()
            for key in found.get_foreign_keys(table)
            if key["referred_table"] == "blobs"
            and key["constrained_columns"][0]
            not in [
                found.get_pk_constraint(table)["constrained_columns"][0],
                *(index["column_names"][0] for index in found.get_indexes(table)),
            ]
        }
        assert missing == set()

    def test_is_upgraded_once_by_processes_that_start_together(self, empty_db_url: str) -> None:
        program = (
            "import sys; from server.store import schema; from server.store.database import Database\n"
            "print('ready', flush=True); sys.stdin.readline()\n"
            "print(schema.upgrade(Database(sys.argv[1])))"
        )
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", program, empty_db_url],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(3)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [process.communicate(timeout=60) for process in processes]
        assert [errors for _, errors in answers] == [""] * 3
        db = Database(empty_db_url)
        head = schema.current_version(db)
        db.close()
        assert sorted(text for text, _ in answers) == [f"({head!r}, {head!r})\n"] * 2 + [f"(None, {head!r})\n"]

    @pytest.mark.parametrize(
        ("revision", "statement", "words"),
        [
            ("0001", "UPDATE clients SET certificate = 'ab'", "release 1 clients from their certificates"),
            ("0002", "UPDATE blob_chunks SET object_key = 'a/b'", "lose 1 chunks of tensors"),
            (
                "0003",
                "UPDATE federations SET reason_detail = 'missing: north'",
                "1 values of federations.reason_detail",
            ),
            ("0004", "UPDATE rounds SET state = 'open'", "the deadlines of 1 rounds under way"),
            ("0006", "UPDATE federations SET deleted_at = 1", "bring back 1 federations"),
            (
                "0006",
                "INSERT INTO invites (id, federation_id, token_hash, created_at, expires_at, revoked_at)"
                " SELECT 'x', id, '', 0, 0, 1 FROM federations",
                "make 1 revoked invites valid again",
            ),
            ("0006", "UPDATE models SET blob_id = NULL", "need the bytes of 1 models"),
            ("0003", "INSERT INTO coordinator (place, id) VALUES (1, 'x')", "the identity that marks the prefix"),
        ],
    )
    def test_is_not_taken_back_where_that_loses_something(
        self, empty_db: Database, revision: str, statement: str, words: str
    ) -> None:
        schema.upgrade(empty_db)
        desk = Desk(empty_db)
        desk.join("north")
        blobs.store(empty_db, b"tensors")
        with empty_db.engine.begin() as connection:
            connection.execute(text("DELETE FROM blob_chunks WHERE size_bytes > 10"))
            connection.execute(text("UPDATE rounds SET state = 'failed'"))
            connection.execute(text(statement))
        before = schema.current_version(empty_db)
        with pytest.raises(CommandError, match=words):
            downgrade(empty_db, revision)
        assert schema.current_version(empty_db) == before

    def test_models_of_an_older_release_know_what_led_to_them(self, empty_db: Database) -> None:
        """It also knows which models once had private state; uploads and participants of old rounds remain."""
        config = schema._config()
        inserts = (
            "INSERT INTO federations (id, name, plan, state, reason, created_at, state_since, completed_rounds,"
            " stale_rounds, version) VALUES (1, 'a', '', 'running', '', 0, 0, 2, 0, 0)",
            "INSERT INTO blobs (id, size_bytes, created_at) VALUES ('b', 0, 0)",
            "INSERT INTO models (federation_id, number, blob_id, private_blob_id, created_at)"
            " VALUES (1, 0, 'b', NULL, 0), (1, 1, 'b', NULL, 0), (1, 3, 'b', 'b', 0)",
            "INSERT INTO clients (id, federation_id, name, token_hash, class_counts, agent_version, device, state,"
            " joined_at, last_seen_at) VALUES ('c', 1, 'c', '', '[]', '', '', 'active', 0, 0)",
            "INSERT INTO rounds (id, federation_id, number, base_model, state, reason, facts, roster, opened_at,"
            " deadline_at) VALUES (7, 1, 4, 3, 'open', '', '{}', '[]', 0, 60)",
            "INSERT INTO participants (round_id, client_id) VALUES (7, 'c')",
        )
        with empty_db.engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "0004")
            for insert in inserts:
                connection.execute(text(insert))
        schema.upgrade(empty_db)
        with empty_db.read() as session:
            rows = session.execute(select(Model).order_by(Model.number)).scalars()
            found = [(row.number, row.rounds_done, row.private_dropped) for row in rows]
            part, round_ = session.get_one(Participant, (7, "c")), session.get_one(Round, 7)
        assert found == [(0, 0, True), (1, 1, True), (3, 2, False)]
        assert (part.seen, part.most_bytes, round_.clock_started) == (False, 0, False)

    def test_can_be_taken_back(self, empty_db: Database) -> None:
        for _ in range(2):
            schema.upgrade(empty_db)
            downgrade(empty_db, "base")
            assert schema.current_version(empty_db) is None
