"""Online backup of the embedded database."""

import os
import sqlite3
from pathlib import Path

from server.store.database import Database, DatabaseError
from shared.system.files import sync_folder


def backup(db: Database, target: Path) -> int:
    """Copy the database to a new file that only its owner can read; return its size in bytes.

    Others may read and write at the same time. The copy is a consistent snapshot and appears only once it is complete.
    """
    if not db.is_sqlite:
        raise DatabaseError(
            "This command backs up SQLite only; the database is PostgreSQL.",
            next_step="Run: pg_dump --format=custom --file=FILE DATABASE (restore with pg_restore).",
        )
    if target.exists():
        raise DatabaseError(f"{target} already exists.", next_step="Choose a new file name.")
    partial = target.with_name(target.name + ".partial")
    try:
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        _copy(db, partial)
        with partial.open("rb") as handle:
            os.fsync(handle.fileno())
        partial.replace(target)
        sync_folder(target.parent)
    except (OSError, sqlite3.Error) as error:
        partial.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or error
        raise DatabaseError(f"Cannot write {target}: {reason}.", next_step="Choose another file.") from error
    return target.stat().st_size


def _copy(db: Database, target: Path) -> None:
    source = db.engine.raw_connection()
    copy = sqlite3.connect(target)
    try:
        source.driver_connection.backup(copy)  # type: ignore[union-attr]  # sqlite3's connection
        copy.execute("PRAGMA journal_mode = DELETE")  # a single file without -wal and -shm
    finally:
        copy.close()
        source.close()
