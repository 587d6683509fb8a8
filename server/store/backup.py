"""A copy of the embedded database while it is in use."""

import os
import sqlite3
from pathlib import Path

from server.store.session import Database, DatabaseError
from shared.files import sync_folder


def backup(db: Database, target: Path) -> int:
    """Write the database as it is now to a new file that only its owner can read; return its size in bytes.

    Others read and write meanwhile. The copy is of one moment, and the file appears only once it is complete.
    """
    if not db.is_sqlite:
        raise DatabaseError(
            "PostgreSQL has its own tool for backups.",
            next_step="Run: pg_dump --format=custom --file=FILE DATABASE; pg_restore brings it back.",
        )
    if target.exists():
        raise DatabaseError(f"{target} exists already.", next_step="Name a new file.")
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
        raise DatabaseError(f"{target} cannot be written: {reason}.", next_step="Name another file.") from error
    return target.stat().st_size


def _copy(db: Database, target: Path) -> None:
    source = db.engine.raw_connection()
    copy = sqlite3.connect(target)
    try:
        source.driver_connection.backup(copy)  # type: ignore[union-attr]  # sqlite3's connection
        copy.execute("PRAGMA journal_mode = DELETE")  # one file, nothing beside it
    finally:
        copy.close()
        source.close()
