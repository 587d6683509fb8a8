"""Transactions on SQLite and PostgreSQL: `read` for looking, `write` for one short change, `snapshot` for one moment.

The embedded database takes one writer at a time and keeps a write-ahead log, see `server.store.sqlite`; timeouts on
PostgreSQL are in `server.store.postgresql`.
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
from server.store.objects import Objects
from shared.problems import DistransError

# FOR NO KEY UPDATE: locks a row without standing in the way of foreign keys that point to it, which could deadlock.
LOCK: dict[str, bool] = {"key_share": True}
_LAST, _AFTER_COMMIT = "last", "after_commit"  # in a session's info
_FULL_FOR_S = 30.0  # how long a disk counts as full after a write failed for lack of room
_CHECKPOINT_PAUSE_S = 1.0  # before writers try again to empty a log that is being read
logger = logging.getLogger(__name__)


class DatabaseError(DistransError):
    """A database that cannot be used as it is."""

    code = "database"


@dataclass(frozen=True)
class DatabaseOptions:
    """How one process uses its database."""

    connections: int = 5  # kept open
    more_connections: int = 15  # opened when needed
    reserve_bytes: int = 64 * 1024 * 1024  # below this much room, SQLite takes no more uploads; the rest still works
    timeouts: postgresql.Timeouts = field(default_factory=postgresql.Timeouts)


def add_last(session: Session, row: DeclarativeBase) -> None:
    """Insert a row as the last step of the transaction: ids of such rows are given in the order of the commits.

    A reader that has seen one of them has seen all with smaller ids. The lock for it is the last one that the
    transaction takes, so it cannot deadlock with rows that others hold.
    """
    session.info.setdefault(_LAST, []).append(row)


def after_commit(session: Session, step: Callable[["Database"], None]) -> None:
    """Call `step` once the transaction is committed, and not at all when it is taken back."""
    session.info.setdefault(_AFTER_COMMIT, []).append(step)


class Database:
    """One engine. SQLite takes one writer at a time; a lock makes this process' writers queue up.

    Without `create` a SQLite file must be there already; to look for one in the wrong place leaves nothing behind.
    """

    def __init__(
        self, url: str, blobs: str | None = None, *, create: bool = True, options: DatabaseOptions | None = None
    ) -> None:
        self.url = parsed = _parse(url)
        self.options = options or DatabaseOptions()
        self.is_sqlite = parsed.drivername == "sqlite"
        self.objects = Objects(blobs) if blobs else None  # None: the bytes of blobs are in the database
        self._writing = threading.Lock()
        self._full_at: float | None = None
        self._checkpoint_at = 0.0
        self.work = threading.Event()  # set after a commit that leaves something for the background worker
        if self.is_sqlite:
            self.file = _prepare_file(parsed, create=create)
        self.engine = self._open(self.options.connections, self.options.more_connections)
        # Of its own, so that `check` answers while all other connections wait for something.
        self._probe = self._open(1, 0)
        self._write_engine = self.engine.execution_options(distrans_begin="BEGIN IMMEDIATE")

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
        event.listen(engine, "handle_error", self._note_error)
        return engine

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Look at the database. On PostgreSQL each statement sees what is committed by then; see `snapshot`."""
        with Session(self.engine, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """One transaction: everything in the block happens, or nothing; once it returns, it is on the disk.

        Keep it short: on SQLite all other writers wait, on PostgreSQL those that need the same rows.
        """
        turn: AbstractContextManager[Any] = self._writing if self.is_sqlite else nullcontext()
        with turn, Session(self._write_engine, expire_on_commit=False) as session, session.begin():
            yield session
            self._insert_last(session)
        for step in session.info.get(_AFTER_COMMIT, []):
            step(self)
        if self.is_sqlite and time.monotonic() >= self._checkpoint_at:
            self.checkpoint()

    def _insert_last(self, session: Session) -> None:
        if rows := session.info.pop(_LAST, []):
            session.flush()  # all other locks are taken before this one
            if not self.is_sqlite:
                session.execute(text(f"SELECT pg_advisory_xact_lock({postgresql.LAST_LOCK})"))
            session.add_all(rows)

    @contextmanager
    def snapshot(self) -> Iterator["Database"]:
        """The database as it is now: all that one thread reads from it sees the same moment. It cannot be written."""
        engine = self.engine if self.is_sqlite else self.engine.execution_options(isolation_level="REPEATABLE READ")
        with Session(engine, expire_on_commit=False) as session:
            for statement in [] if self.is_sqlite else postgresql.unhurried(self.options.timeouts):
                session.execute(text(statement))
            session.execute(text("SELECT count(*) FROM coordinator"))  # the moment is that of the first look
            yield _Snapshot(self, session)

    @contextmanager
    def migration(self) -> Iterator[Connection]:
        """A transaction that may change the schema: one at a time over all processes, for as long as it takes."""
        with self._write_engine.begin() as connection:
            for statement in [] if self.is_sqlite else postgresql.MIGRATION:
                connection.exec_driver_sql(statement)
            yield connection

    def check(self) -> None:
        """Fail unless the database answers, even when requests use all its other connections."""
        with self._probe.connect() as connection:
            connection.execute(text("SELECT 1"))

    def checkpoint(self) -> bool:
        """Empty SQLite's write-ahead log if it is large; False when a long reader still needs it."""
        if not self.is_sqlite or sqlite.wal_bytes(self.file) <= sqlite.WAL_LIMIT_BYTES:
            return True
        try:
            with self._writing, closing(self.engine.raw_connection()) as connection:
                if sqlite.truncate_wal(connection.driver_connection):  # type: ignore[arg-type]  # sqlite3's
                    return True
        except (sqlite3.Error, SQLAlchemyError) as error:  # what was committed is safe in the log
            logger.warning("the write-ahead log could not be emptied: %s", error)
        self._checkpoint_at = time.monotonic() + _CHECKPOINT_PAUSE_S
        return False

    def is_full(self) -> bool:
        """Whether there is no room for more uploads, or a write has failed for lack of room lately."""
        lately = self._full_at is not None and time.monotonic() < self._full_at + _FULL_FOR_S
        return lately or self._lacks_room()

    def require_room(self, size_bytes: int = 0) -> None:
        """Refuse to take this many bytes of tensors into the database when they would use up the reserve."""
        if self._lacks_room(size_bytes):
            raise failures.StorageFull(
                "The coordinator has no room for more tensors.", next_step="Its operator has to make room on the disk."
            )

    def _lacks_room(self, size_bytes: int = 0) -> bool:
        """Deletions need room too, in the log: the reserve keeps them and everything else but uploads possible."""
        if not self.is_sqlite:
            return False
        free, needed = self._free_bytes(), self.options.reserve_bytes + size_bytes
        if free >= needed or free < self.options.reserve_bytes // 4:  # the quarter is for the log
            return free < needed
        with self._probe.connect() as connection:
            pages, size = (
                connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in ("freelist_count", "page_size")
            )
        return bool(free + pages * size < needed)

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self.file.parent).free

    def is_out_of_room(self, error: BaseException) -> bool:
        """Whether this error of the database means that its disk is full."""
        return failures.is_full(error) or (
            failures.is_io_error(error) and self._free_bytes() < self.options.reserve_bytes // 4
        )

    def note_full(self, error: BaseException) -> None:
        """Remember that a write failed for lack of room."""
        if self._full_at is None or time.monotonic() >= self._full_at + _FULL_FOR_S:
            logger.error("the storage is full: %s; make room, until then uploads are refused with status 507", error)
        self._full_at = time.monotonic()

    def _note_error(self, context: ExceptionContext) -> None:
        if self.is_out_of_room(context.original_exception):
            self.note_full(context.original_exception)

    def close(self) -> None:
        """Give the connections back."""
        self._probe.dispose()
        self.engine.dispose()


class _Snapshot(Database):
    """A database at one moment, for one thread."""

    def __init__(self, db: Database, session: Session) -> None:  # shares everything with `db` but its `read`
        self.__dict__.update(vars(db))
        self._session = session

    @override
    @contextmanager
    def read(self) -> Iterator[Session]:
        yield self._session

    @override
    def write(self) -> NoReturn:
        raise TypeError("a snapshot cannot be written")


def _parse(url: str) -> URL:
    """The address with the driver that is used here, whatever it names."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:  # ValueError: a port that is no number
        raise DatabaseError(
            "The database address cannot be read.",
            next_step="Use sqlite:///path/to/file.db or postgresql://user:password@host/name.",
        ) from error
    driver = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}.get(
        parsed.get_backend_name()
    )
    if driver is None:
        raise DatabaseError(f"{parsed.get_backend_name()} is not supported.", next_step="Use SQLite or PostgreSQL.")
    return parsed.set(drivername=driver)


def _prepare_file(url: URL, *, create: bool) -> Path:
    if url.database in (None, "", ":memory:"):
        raise DatabaseError("SQLite needs a file.", next_step="Use sqlite:///path/to/file.db.")
    file = Path(str(url.database))
    if not create and not file.exists():
        raise DatabaseError(
            f"There is no database at {file}.",
            next_step="Name yours with --data-dir or --db; `distrans-server serve` creates a new one.",
        )
    another = "Choose another --data-dir or --db."
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DatabaseError(
            f"The folder {file.parent} cannot be created: {error.strerror}.", next_step=another
        ) from error
    try:
        sqlite.prepare_file(file)
    except OSError as error:
        raise DatabaseError(f"The database {file} cannot be created: {error.strerror}.", next_step=another) from error
    return file
