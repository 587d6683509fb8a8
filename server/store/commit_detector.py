"""Detects commits to the database at constant cost, whatever its size."""

from sqlalchemy import text

from server.store.database import Database


class CommitDetector:
    """A marker that changes with every commit of any process, and sometimes without one. For one thread."""

    def __init__(self, db: Database) -> None:
        self._db = db
        # SQLite counts commits by other connections as seen from one connection, so keep it open and never write on it.
        self._connection = db.engine.raw_connection() if db.is_sqlite else None

    def marker(self) -> str:
        """Return the marker; two equal ones mean that no visible change was committed in between."""
        if self._connection is not None:
            cursor = self._connection.cursor()
            try:
                return str(cursor.execute("PRAGMA data_version").fetchone()[0])
            finally:
                cursor.close()
        # The set of visible transactions, without those that only read.
        with self._db.engine.connect() as connection:
            return str(connection.execute(text("SELECT CAST(pg_current_snapshot() AS text)")).scalar_one())

    def close(self) -> None:
        """Return the connection to the pool."""
        if self._connection is not None:
            self._connection.close()
