"""Online backup of the embedded database, and of the files that a spool keeps for it."""

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

from server.store.database import Database, DatabaseError
from server.store.objects.spool import Spool
from shared.system.files import sync_folder

_ATTEMPTS = 5


def backup(db: Database, target: Path) -> int:
    """Copy the database to a new file that only its owner can read; return the size of the backup in bytes.

    If tensors are in a spool, `files_of(target)` holds those that the copy refers to. Others may read and write at the
    same time. The copy is a consistent snapshot and appears only once it is complete.
    """
    if not db.is_sqlite:
        raise DatabaseError(
            "This command backs up SQLite only; the database is PostgreSQL.",
            next_step="Run: pg_dump --format=custom --file=FILE DATABASE (restore with pg_restore).",
        )
    spool = db.objects if isinstance(db.objects, Spool) else None
    for name in (target, files_of(target)):
        if name.exists():
            raise DatabaseError(f"{name} already exists.", next_step="Choose a new file name.")
    partial = target.with_name(target.name + ".partial")
    try:
        if spool is None:
            _copy(db, partial)
        else:
            _copy_with_files(db, spool, partial)
            files_of(partial).replace(files_of(target))
        partial.replace(target)
        sync_folder(target.parent)
    except (OSError, sqlite3.Error) as error:
        partial.unlink(missing_ok=True)
        shutil.rmtree(files_of(partial), ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise DatabaseError(f"Cannot write {target}: {reason}.", next_step="Choose another file.") from error
    files = files_of(target).iterdir() if spool else ()
    return sum(file.stat().st_size for file in (target, *files))


def files_of(target: Path) -> Path:
    """Return the folder next to a backup that holds its tensors."""
    return target.with_name(target.name + ".blobs")


def _copy(db: Database, target: Path) -> None:
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    source = db.engine.raw_connection()
    copy = sqlite3.connect(target)
    try:
        source.driver_connection.backup(copy)  # type: ignore[union-attr]  # sqlite3's connection
        copy.execute("PRAGMA journal_mode = DELETE")  # a single file without -wal and -shm
    finally:
        copy.close()
        source.close()
    with target.open("rb") as handle:
        os.fsync(handle.fileno())


def _copy_with_files(db: Database, spool: Spool, target: Path) -> None:
    """Copy the database, then the files it refers to; start over if one of them has been removed in between.

    That goes faster each time, because files never change: those already copied stay.
    """
    folder = files_of(target)
    shutil.rmtree(folder, ignore_errors=True)  # left by a backup that was killed
    folder.mkdir(mode=0o700)
    for _ in range(_ATTEMPTS):
        _copy(db, target)
        with closing(sqlite3.connect(target)) as copy:
            chunks = "SELECT object_key, MAX(size_bytes) FROM blob_chunks WHERE object_key IS NOT NULL GROUP BY 1"
            wanted = {key: size for key, size in copy.execute(chunks) if spool.holds(key)}
        if all(_copy_file(spool.path(key), folder / key, size) for key, size in wanted.items()):
            break
    else:
        raise OSError("its tensors are being removed faster than they can be copied")
    for file in folder.iterdir():
        if file.name not in wanted:
            file.unlink()
    sync_folder(folder)


def _copy_file(source: Path, target: Path, size: int) -> bool:
    """Copy a file unless that was done before; return whether the copy has all the bytes that count."""
    if not target.exists() or target.stat().st_size < size:
        try:
            with source.open("rb") as original, _create(target) as copy:
                shutil.copyfileobj(original, copy, 1024 * 1024)
                copy.flush()
                os.fsync(copy.fileno())
        except FileNotFoundError:
            return False
    return target.stat().st_size >= size


def _create(file: Path) -> BinaryIO:
    return os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
