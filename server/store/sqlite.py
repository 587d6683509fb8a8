"""The embedded database: files, connection settings, and write-ahead log."""

import logging
import os
import sqlite3
import stat
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from shared.system.files import sync_folder

BUSY_TIMEOUT_MS = 60_000
# A larger log is written back and truncated. With a quarter of it, uploads into rows take half as long again, because
# each time waits for the disk; but then all of it fits into the space held in reserve.
WAL_LIMIT_BYTES = 64 * 1024 * 1024
SCARCE_WAL_BYTES = 16 * 1024 * 1024  # the limit while space is scarce
# For new files; the largest. With 4 KiB, tensors take twice the CPU to write and ten times as much to remove.
PAGE_BYTES = 64 * 1024
_CHECKPOINT_WAIT_MS = 250  # for readers of the log; writers wait meanwhile
logger = logging.getLogger(__name__)


def prepare_file(file: Path) -> None:
    """Create the database file if needed, and make it readable by its owner only.

    SQLite gives -wal and -shm the same mode, whatever the umask. The folder is synced so that the name of a new file
    survives a power cut.
    """
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        sync_folder(file.parent)
    except FileExistsError:
        for name in (file, *wal_files(file)):
            _restrict(name)


def wal_files(file: Path) -> tuple[Path, Path]:
    """Return the paths of the write-ahead log and its index."""
    return Path(f"{file}-wal"), Path(f"{file}-shm")


def _restrict(file: Path) -> None:
    try:
        found = file.stat()
        mode = stat.S_IMODE(found.st_mode)
        if mode & 0o077 and stat.S_ISREG(found.st_mode):  # the URL may name a folder by mistake
            file.chmod(mode & 0o700)
            logger.warning("%s was accessible to other users (mode %o); changed to %o", file, mode, mode & 0o700)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s is accessible to other users and could not be changed: %s", file, error.strerror)


def prepare_connection(connection: Any, _record: Any) -> None:
    """Set up a new connection."""
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    cursor.execute(f"PRAGMA page_size = {PAGE_BYTES}")  # ignored unless the file is new; must precede WAL
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")  # see `begin`
    cursor.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
    # Some builds overwrite all deleted bytes with zeros, which writes removed tensors once more. FAST does so only in
    # pages that are written anyway.
    cursor.execute("PRAGMA secure_delete = FAST")
    # Journals of single statements outgrow SQLite's buffer with large pages; /tmp may be read-only, as in the image.
    cursor.execute("PRAGMA temp_store = MEMORY")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def begin(connection: Connection) -> None:
    """Begin a transaction. sqlite3 is in autocommit mode, so that a write can take its lock right away.

    By default its commit survives a power cut: FULL syncs the log, including what earlier commits wrote. NORMAL leaves
    that to a later commit.
    """
    options = connection.get_execution_options()
    wanted = options.get("distrans_synchronous", "FULL")
    if connection.info.get("synchronous", "FULL") != wanted:
        connection.exec_driver_sql(f"PRAGMA synchronous = {wanted}")
        connection.info["synchronous"] = wanted
    connection.exec_driver_sql(options.get("distrans_begin", "BEGIN"))


def wal_bytes(file: Path) -> int:
    """Return the size of the write-ahead log on disk."""
    try:
        return wal_files(file)[0].stat().st_size
    except FileNotFoundError:
        return 0


def sync_wal(file: Path) -> None:
    """Make the write-ahead log durable. What is no longer in it was synced when it was written back."""
    try:
        descriptor = os.open(wal_files(file)[0], os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def truncate_wal(connection: sqlite3.Connection) -> bool:
    """Write the log back into the database and truncate it; return False if a long reader still needs it."""
    connection.execute(f"PRAGMA busy_timeout = {_CHECKPOINT_WAIT_MS}")
    try:
        is_blocked = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        return not is_blocked
    finally:
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
