"""The embedded database: acknowledged writes are durable, files are private, the log stays bounded."""

import os
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import text

from server.store import blobs, sqlite
from server.store.database import Database, DatabaseError
from server.store.schema import upgrade

MIB = 1024 * 1024


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path / 'data' / 'coordinator.db'}")
    upgrade(database)
    yield database
    database.close()


def modes(folder: Path) -> dict[str, int]:
    return {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


class TestAcknowledged:
    def test_means_synced_on_every_connection(self, db: Database) -> None:
        """2 is FULL: the log is synced before COMMIT returns. With NORMAL a power cut could undo the commit."""
        with ExitStack() as stack:
            sessions = [stack.enter_context(db.read()) for _ in range(8)]
            found = {session.execute(text("PRAGMA synchronous")).scalar_one() for session in sessions}
        with db.write() as session:
            found.add(session.execute(text("PRAGMA synchronous")).scalar_one())
        assert found == {2}

    def test_includes_what_was_written_with_less_care(self, db: Database) -> None:
        """1 is NORMAL, for the pieces of an upload: the commit that acknowledges them syncs the log they are in."""
        pragma = text("PRAGMA synchronous")
        with db.write(durable=False) as session:
            assert session.execute(pragma).scalar_one() == 1
        with db.write() as session:
            assert session.execute(pragma).scalar_one() == 2
        db.sync()


class TestPages:
    def test_of_a_new_database_are_large(self, db: Database) -> None:
        with db.read() as session:
            assert session.execute(text("PRAGMA page_size")).scalar_one() == 64 * 1024

    def test_of_an_older_database_stay_as_they_are(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sqlite, "PAGE_BYTES", 4096)
        old = Database(f"sqlite:///{tmp_path / 'coordinator.db'}")
        upgrade(old)
        data = os.urandom(3 * MIB)
        blob_id = blobs.store(old, data)
        old.close()
        monkeypatch.undo()
        db = Database(f"sqlite:///{tmp_path / 'coordinator.db'}")
        more = blobs.store(db, data)
        assert [blobs.read_all(db, stored) for stored in (blob_id, more)] == [data, data]
        with db.read() as session:
            assert session.execute(text("PRAGMA page_size")).scalar_one() == 4096
        db.close()

    def test_of_removed_tensors_are_not_written_once_more(self, db: Database) -> None:
        blob_id = blobs.store(db, os.urandom(8 * MIB))
        assert db.checkpoint()
        with db.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        blobs.remove(db, blob_id)
        assert sqlite.wal_bytes(db.file) < MIB


class TestFiles:
    def test_are_private_whatever_the_folder_and_the_umask(self, tmp_path: Path) -> None:
        folder = tmp_path / "open to all"
        folder.mkdir()
        folder.chmod(0o777)
        with umask(0):
            db = Database(f"sqlite:///{folder / 'coordinator.db'}")
            upgrade(db)
            with db.read() as session:  # an open connection keeps the -wal and -shm files
                session.execute(text("SELECT count(*) FROM federations"))
                assert modes(folder) == dict.fromkeys(
                    ["coordinator.db", "coordinator.db-wal", "coordinator.db-shm"], 0o600
                )
            db.close()

    def test_of_an_older_release_are_closed_to_others(self, db: Database, caplog: pytest.LogCaptureFixture) -> None:
        with db.read() as session:
            session.execute(text("SELECT count(*) FROM federations"))
            for file in (db.file, *sqlite.wal_files(db.file)):
                file.chmod(0o644)
            Database(f"sqlite:///{db.file}").close()
            assert set(modes(db.file.parent).values()) == {0o600}
        assert "coordinator.db was accessible to other users (mode 644); changed to 600" in caplog.text

    def test_do_not_include_a_folder_that_was_named_by_mistake(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o755)
        Database(f"sqlite:///{tmp_path}").close()
        assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755

    def test_that_cannot_be_created_are_an_error_with_a_next_step(self, tmp_path: Path) -> None:
        with pytest.raises(DatabaseError, match=r"Cannot create .*: File name too long") as caught:
            Database(f"sqlite:///{tmp_path / ('x' * 300)}")
        assert caught.value.next_step == "Choose another --data-dir or --db."


class TestLog:
    def test_stays_small_next_to_downloads(self, db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        """Overlapping downloads mean there is always a reader: without TRUNCATE the log would hold all 15 MiB."""
        monkeypatch.setattr(sqlite, "WAL_LIMIT_BYTES", MIB)
        monkeypatch.setattr(sqlite, "_CHECKPOINT_WAIT_MS", 60_000)  # a busy machine may suspend a reader for a while
        monkeypatch.setattr(blobs, "CHUNK_BYTES", MIB // 4)
        downloaded = blobs.store(db, os.urandom(MIB))
        over = threading.Event()

        def download() -> None:
            while not over.is_set():
                assert sum(map(len, blobs.read(db, downloaded))) == MIB

        largest = 0
        with ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(download) for _ in range(3)]
            try:
                for _ in range(3):
                    blob_id = blobs.store(db, os.urandom(5 * MIB))
                    largest = max(largest, sqlite.wal_bytes(db.file))
                    blobs.remove(db, blob_id)
            finally:
                over.set()
            for reader in readers:
                reader.result()
        assert largest < 4 * MIB
        assert db.checkpoint()
        assert sqlite.wal_bytes(db.file) <= sqlite.WAL_LIMIT_BYTES

    def test_shrinks_once_a_long_reader_has_gone(self, db: Database) -> None:
        with db.snapshot():
            blobs.store(db, os.urandom(sqlite.WAL_LIMIT_BYTES + 8 * MIB))
            assert not db.checkpoint(), "the snapshot still needs it"
            assert sqlite.wal_bytes(db.file) > 24 * MIB
        assert db.checkpoint()
        assert sqlite.wal_bytes(db.file) == 0
