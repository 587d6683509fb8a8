"""Reads of a few rows in the event loop itself.

On SQLite such a read takes some 30 µs, several times less than handing it to a thread. It never waits: readers do not
block each other, nor a writer them. PostgreSQL is at the other end of a socket, so its reads stay in threads.
"""

import sqlite3
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.sql.expression import ClauseElement

if TYPE_CHECKING:
    from server.store.database import Database


class QuickReads:
    """A connection that only reads, for one thread at a time. It sees what was committed before each read."""

    def __init__(self, db: "Database") -> None:
        self._db = db
        self._connection: sqlite3.Connection | None = None
        self._compiled: dict[ClauseElement, tuple[str, list[str]]] = {}

    def rows(self, statement: ClauseElement, parameters: Mapping[str, object]) -> list[tuple[Any, ...]] | None:
        """Return all rows of a statement built once; None if the caller must read them in a thread instead."""
        if not self._db.is_sqlite:
            return None
        try:
            connection = self._connection or self._connect()
            text, names = self._compiled.get(statement) or self._compile(statement)
            return connection.execute(text, [parameters[name] for name in names]).fetchall()
        except (sqlite3.Error, SQLAlchemyError):  # a thread can wait and try again, and reports what is wrong
            return None

    def _connect(self) -> sqlite3.Connection:
        pooled = self._db.engine.raw_connection()
        connection = cast(sqlite3.Connection, pooled.driver_connection)
        pooled.detach()
        connection.execute("PRAGMA busy_timeout = 0")
        connection.execute("PRAGMA query_only = ON")
        self._connection = connection
        return connection

    def _compile(self, statement: ClauseElement) -> tuple[str, list[str]]:
        compiled = statement.compile(self._db.engine, compile_kwargs={"render_postcompile": True})
        found = self._compiled[statement] = str(compiled), list(getattr(compiled, "positiontup", None) or ())
        return found

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
