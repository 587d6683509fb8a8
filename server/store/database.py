"""Transactions on SQLite and PostgreSQL: `read`, `write` for one short change, `snapshot` for a consistent view.

`server.store.sqlite` handles the embedded database's write-ahead log, `server.store.postgresql` the timeouts.
"""

import logging
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.engine import URL, Engine, ExceptionContext, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Session
from typing_extensions import override

from server.store import failures, postgresql, sqlite
from server.store.objects.addresses import open_store
from shared.contract.errors import DistransError

# FOR NO KEY UPDATE: does not block inserts of rows with foreign keys to the locked row, which could deadlock.
LOCK: dict[str, bool] = {"key_share": True}
_LAST, _AFTER_COMMIT, _DATABASE = "last", "after_commit", "database"  # keys of Session.info
BULK_PAUSE_S = 0.002  # between two transactions of a bulk job, so that waiting writers get their turn
_FULL_FOR_S = 30.0  # how long the disk counts as full after a write failed for lack of space
_CHECKPOINT_PAUSE_S = 1.0  # before the next attempt to truncate a log that is being read
logger = logging.getLogger(__name__)


class DatabaseError(DistransError):
    """The database cannot be used."""

    code = "database"


@dataclass(frozen=True)
class DatabaseOptions:
    """Connection and storage settings of one process."""

    connections: int = 5  # kept open
    more_connections: int = 15  # opened when needed
    reserve_bytes: int = 64 * 1024 * 1024  # with less free space, disks accept no uploads; everything else works
    timeouts: postgresql.Timeouts = field(default_factory=postgresql.Timeouts)


def add_last(session: Session, row: DeclarativeBase) -> None:
    """Insert a row as the last step of the transaction, so that ids grow in commit order.

    A reader that has seen one such row has seen all with smaller ids. The lock for this is the last one the transaction
    takes, so it cannot deadlock with row locks of others.
    """
    session.info.setdefault(_LAST, []).append(row)


def after_commit(session: Session, step: Callable[["Database"], None]) -> None:
    """Call `step` after the commit; skip it on rollback."""
    session.info.setdefault(_AFTER_COMMIT, []).append(step)


def database_of(session: Session) -> "Database":
    """Return the database whose session this is."""
    db: Database = session.info[_DATABASE]
    return db


class Database:
    """One database engine. SQLite allows one writer at a time; this process's writers queue on a lock.

    Without `create`, a SQLite file must already exist; a wrong path creates nothing.
    """

    def __init__(
        self, url: str, blobs: str | None = None, *, create: bool = True, options: DatabaseOptions | None = None
    ) -> None:
        self.url = parsed = _parse(url)
        self.options = options or DatabaseOptions()
        self.is_sqlite = parsed.drivername == "sqlite"
        self.objects = open_store(blobs) if blobs else None  # None: blobs are stored in the database
        self._writing = threading.Lock()
        self._full_at: float | None = None
        self._checkpoint_at = 0.0
        self.work_available = threading.Event()  # set after a commit that gives the background worker something to do
        self.change_committed = threading.Event()  # set after a commit that agents wait for, see server.store.changes
        self.removal_due = threading.Event()  # set after a commit that leaves the cleaner something to remove
        if self.is_sqlite:
            self.file = _prepare_file(parsed, create=create)
        self.engine = self._open(self.options.connections, self.options.more_connections)
        # Separate, so that `check` answers while all other connections are blocked.
        self._probe = self._open(1, 0)
        self._write_engine = self.engine.execution_options(distrans_begin="BEGIN IMMEDIATE")
        self._relaxed_engine = self._write_engine.execution_options(distrans_synchronous="NORMAL")

    def _open(self, connections: int, more: int) -> Engine:
        connect_args: dict[str, Any] = (
            {"isolation_level": None, "timeout": sqlite.BUSY_TIMEOUT_MS / 1000}
            if self.is_sqlite
            else postgresql.connect_args(self.url, self.options.timeouts)
        )
        engine = create_engine(
            self.url,
            pool_size=connections,
            max_overflow=more,
            pool_timeout=10,
            pool_pre_ping=not self.is_sqlite,
            connect_args=connect_args,
        )
        if self.is_sqlite:
            event.listen(engine, "connect", sqlite.prepare_connection)
            event.listen(engine, "begin", sqlite.begin)
        else:
            event.listen(engine, "do_execute", postgresql.execute)
        event.listen(engine, "handle_error", self._note_error)
        return engine

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Open a session for reading. On PostgreSQL each statement sees the latest commits; see `snapshot`."""
        with Session(self.engine, expire_on_commit=False, info={_DATABASE: self}) as session:
            yield session

    @contextmanager
    def write(self, *, durable: bool = True) -> Iterator[Session]:
        """Run one transaction: all or nothing, and durable once the block has ended.

        Keep it short: on SQLite all other writers wait; on PostgreSQL, those that need the same rows. One that is not
        `durable` may be undone by a power cut until the next durable one commits, which covers all before it.
        """
        turn: AbstractContextManager[Any] = self._writing if self.is_sqlite else nullcontext()
        engine = self._write_engine if durable else self._relaxed_engine
        with turn, Session(engine, expire_on_commit=False, info={_DATABASE: self}) as session, session.begin():
            if not durable and not self.is_sqlite:
                session.execute(text("SET LOCAL synchronous_commit = off"))
            yield session
            self._insert_last(session)
        for step in session.info.get(_AFTER_COMMIT, []):
            step(self)
        if self.is_sqlite and time.monotonic() >= self._checkpoint_at:
            self.checkpoint()

    def sync(self) -> None:
        """Make everything committed so far durable."""
        if self.is_sqlite:
            sqlite.sync_wal(self.file)
            return
        with self.write() as session:
            session.execute(text("SELECT pg_current_xact_id()"))  # without an id, a commit would wait for nothing

    def _insert_last(self, session: Session) -> None:
        if rows := session.info.pop(_LAST, []):
            session.flush()  # takes all other locks before this one
            if not self.is_sqlite:
                session.execute(text(f"SELECT pg_advisory_xact_lock({postgresql.LAST_LOCK})"))
            session.add_all(rows)

    @contextmanager
    def snapshot(self) -> Iterator["Database"]:
        """Yield a read-only view of the database at one moment, for one thread."""
        engine = self.engine if self.is_sqlite else self.engine.execution_options(isolation_level="REPEATABLE READ")
        with Session(engine, expire_on_commit=False, info={_DATABASE: self}) as session:
            for statement in [] if self.is_sqlite else postgresql.snapshot_setup(self.options.timeouts):
                session.execute(text(statement))
            session.execute(text("SELECT count(*) FROM coordinator"))  # the first query fixes the moment
            yield _Snapshot(self, session)

    @contextmanager
    def migration(self) -> Iterator[Connection]:
        """Run a schema migration: one at a time across all processes, without statement timeouts."""
        with self._write_engine.begin() as connection:
            for statement in [] if self.is_sqlite else postgresql.MIGRATION:
                connection.exec_driver_sql(statement)
            yield connection

    def check(self) -> None:
        """Raise unless the database answers; works even when requests hold all other connections."""
        with self._probe.connect() as connection:
            connection.execute(text("SELECT 1"))

    def checkpoint(self) -> bool:
        """Truncate SQLite's write-ahead log if it is large; return False if a long reader still needs it."""
        if not self.is_sqlite or sqlite.wal_bytes(self.file) <= sqlite.WAL_LIMIT_BYTES:
            return True
        try:
            with self._writing, closing(self.engine.raw_connection()) as connection:
                if sqlite.wal_bytes(self.file) <= sqlite.WAL_LIMIT_BYTES:  # another thread was faster
                    return True
                if sqlite.truncate_wal(connection.driver_connection):  # type: ignore[arg-type]  # sqlite3's
                    return True
        except (sqlite3.Error, SQLAlchemyError) as error:  # commits are safe in the log
            logger.warning("the write-ahead log could not be truncated: %s", error)
        self._checkpoint_at = time.monotonic() + _CHECKPOINT_PAUSE_S
        return False

    def is_full(self) -> bool:
        """Return whether there is no room for uploads, or a write recently failed for lack of space."""
        failed_recently = self._full_at is not None and time.monotonic() < self._full_at + _FULL_FOR_S
        return failed_recently or self._lacks_room() or self._objects_lack_room()

    def require_room(self, size_bytes: int = 0) -> None:
        """Raise StorageFull if storing this many more bytes would eat into the reserve."""
        if self._lacks_room(size_bytes) if self.objects is None else self._objects_lack_room(size_bytes):
            raise failures.StorageFull(
                "The coordinator's disk is full.", next_step="Ask its operator to free some disk space."
            )

    def _lacks_room(self, size_bytes: int = 0) -> bool:
        """Return whether an upload would eat into the reserve, which deletions need for their log entries."""
        if not self.is_sqlite:
            return False
        free, needed = self._free_bytes(), self.options.reserve_bytes + size_bytes
        if free >= needed or free < self._log_reserve_bytes:
            return free < needed
        with self._probe.connect() as connection:
            pages, size = (
                connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in ("freelist_count", "page_size")
            )
        return bool(free + pages * size < needed)

    def _objects_lack_room(self, size_bytes: int = 0) -> bool:
        free = None if self.objects is None else self.objects.free_bytes()
        return free is not None and free < self.options.reserve_bytes + size_bytes

    @property
    def _log_reserve_bytes(self) -> int:
        """The quarter of the reserve that is for SQLite's log."""
        return self.options.reserve_bytes // 4

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self.file.parent).free

    def is_out_of_room(self, error: BaseException) -> bool:
        """Return whether this database error means that the disk is full."""
        return failures.is_full(error) or (failures.is_io_error(error) and self._free_bytes() < self._log_reserve_bytes)

    def note_full(self, error: BaseException) -> None:
        """Remember that a write failed for lack of space."""
        if self._full_at is None or time.monotonic() >= self._full_at + _FULL_FOR_S:
            logger.error("storage is full: %s; uploads get status 507 until space is freed", error)
        self._full_at = time.monotonic()

    def _note_error(self, context: ExceptionContext) -> None:
        if self.is_out_of_room(context.original_exception):
            self.note_full(context.original_exception)

    def close(self) -> None:
        """Close all connections."""
        self._probe.dispose()
        self.engine.dispose()


class _Snapshot(Database):
    """A read-only view of a database at one moment, for one thread."""

    def __init__(self, db: Database, session: Session) -> None:  # shares everything with `db` but its `read`
        self.__dict__.update(vars(db))
        self._session = session

    @override
    @contextmanager
    def read(self) -> Iterator[Session]:
        yield self._session

    @override
    def write(self, *, durable: bool = True) -> NoReturn:
        raise TypeError("a snapshot cannot be written")


def _parse(url: str) -> URL:
    """Parse a database URL and set the driver this program uses."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:  # ValueError: the port is not a number
        raise DatabaseError(
            "Invalid database URL.",
            next_step="Use sqlite:///path/to/file.db or postgresql://user:password@host/name.",
        ) from error
    driver = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}.get(
        parsed.get_backend_name()
    )
    if driver is None:
        raise DatabaseError(
            f"Unsupported database {parsed.get_backend_name()!r}.", next_step="Use SQLite or PostgreSQL."
        )
    return parsed.set(drivername=driver)


def _prepare_file(url: URL, *, create: bool) -> Path:
    if url.database in (None, "", ":memory:"):
        raise DatabaseError("SQLite needs a file.", next_step="Use sqlite:///path/to/file.db.")
    file = Path(str(url.database))
    if not create and not file.exists():
        raise DatabaseError(
            f"No database found at {file}.",
            next_step="Set --data-dir or --db; `distrans-server serve` creates a new database.",
        )
    another = "Choose another --data-dir or --db."
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DatabaseError(f"Cannot create folder {file.parent}: {error.strerror}.", next_step=another) from error
    try:
        sqlite.prepare_file(file)
    except OSError as error:
        raise DatabaseError(f"Cannot create database {file}: {error.strerror}.", next_step=another) from error
    return file
