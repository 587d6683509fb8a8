"""Transactions on SQLite and PostgreSQL: `read` for looking, `write` for one short change."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import Session
from typing_extensions import override

from server.store.objects import Objects, ObjectStoreError
from shared.problems import DistransError

_BUSY_TIMEOUT_MS = 60_000
# FOR NO KEY UPDATE: locks a row without standing in the way of foreign keys that point to it, which could deadlock.
LOCK: dict[str, bool] = {"key_share": True}
_POOL_SIZE, _POOL_OVERFLOW = 10, 30
DEAD_OBJECTS = "dead_objects"  # in a session's info: keys of objects to remove once it is committed
logger = logging.getLogger(__name__)


class DatabaseError(DistransError):
    """A database that cannot be used as it is."""

    code = "database"


class _Writing(Session):
    """A session whose `info` says what follows from the transaction, and nothing when it was taken back."""

    @override
    def rollback(self) -> None:
        self.info.clear()
        super().rollback()


class Database:
    """One engine. SQLite takes one writer at a time; a lock makes this process' writers queue up fairly.

    Without `create` a SQLite file must be there already; to look for one in the wrong place leaves nothing behind.
    """

    def __init__(self, url: str, blobs: str | None = None, *, create: bool = True) -> None:
        try:
            parsed = make_url(url)
        except (ArgumentError, ValueError) as error:  # ValueError: a port that is no number
            raise DatabaseError(
                "The database address cannot be read.",
                next_step="Use sqlite:///path/to/file.db or postgresql://user:password@host/name.",
            ) from error
        # One driver for each, whatever the address names.
        driver = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}.get(
            parsed.get_backend_name()
        )
        if driver is None:
            raise DatabaseError(f"{parsed.get_backend_name()} is not supported.", next_step="Use SQLite or PostgreSQL.")
        self.url = parsed = parsed.set(drivername=driver)
        self.is_sqlite = driver == "sqlite"
        self.objects = Objects(blobs) if blobs else None  # None: the bytes of blobs are in the database
        self._writing = threading.Lock()
        self.work = threading.Event()  # set after a commit that leaves something for the background worker
        if self.is_sqlite:
            if parsed.database in (None, "", ":memory:"):
                raise DatabaseError("SQLite needs a file.", next_step="Use sqlite:///path/to/file.db.")
            file = Path(str(parsed.database))
            if not create and not file.exists():
                raise DatabaseError(
                    f"There is no database at {file}.",
                    next_step="Name yours with --data-dir or --db; `distrans-server serve` makes a new one.",
                )
            _make_folder(file.parent)
            # Autocommit mode: this module says BEGIN itself, so that a write takes its lock at the start.
            connect_args: dict[str, Any] = {"isolation_level": None, "timeout": _BUSY_TIMEOUT_MS / 1000}
        else:
            connect_args = {"connect_timeout": 10}
        self.engine = create_engine(
            parsed,
            pool_size=_POOL_SIZE,
            max_overflow=_POOL_OVERFLOW,
            pool_pre_ping=not self.is_sqlite,
            connect_args=connect_args,
        )
        if self.is_sqlite:
            event.listen(self.engine, "connect", _prepare_sqlite)
            event.listen(self.engine, "begin", _begin_sqlite)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A consistent look at the database."""
        with Session(self.engine, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """One transaction: everything in the block happens, or nothing. Keep it short."""
        if self.is_sqlite:
            engine = self.engine.execution_options(distrans_begin="BEGIN IMMEDIATE")
            with self._writing, _Writing(engine, expire_on_commit=False) as session, session.begin():
                yield session
        else:
            with _Writing(self.engine, expire_on_commit=False) as session, session.begin():
                yield session
        if session.info.get("wake"):
            self.work.set()
        self._delete_objects(session.info.get(DEAD_OBJECTS, []))

    def _delete_objects(self, keys: list[str]) -> None:
        """What the transaction let go; an object that cannot be removed now is garbage, and will be collected."""
        if self.objects is None or not keys:
            return
        try:
            self.objects.delete(keys)
        except ObjectStoreError as error:
            logger.warning("%s", error)

    def close(self) -> None:
        """Give the connections back."""
        self.engine.dispose()


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DatabaseError(
            f"The folder {folder} cannot be made: {error.strerror}.", next_step="Choose another --data-dir or --db."
        ) from error


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("distrans_begin", "BEGIN"))
