"""Whether anything was committed to the database, at a cost that does not depend on what is in it."""

from sqlalchemy import text

from server.store.session import Database


class Changes:
    """A marker that differs after every commit, whichever process made it; it may differ without one. One thread's."""

    def __init__(self, db: Database) -> None:
        self._db = db
        # SQLite counts the commits of others as one connection sees them, so this one is kept and never writes.
        self._connection = db.engine.raw_connection() if db.is_sqlite else None

    def marker(self) -> str:
        """Return a marker. Two equal ones mean that nothing visible in the database changed in between."""
        if self._connection is not None:
            cursor = self._connection.cursor()
            try:
                return str(cursor.execute("PRAGMA data_version").fetchone()[0])
            finally:
                cursor.close()
        # The set of transactions that are visible now. Transactions that only read are not in it.
        with self._db.engine.connect() as connection:
            return str(connection.execute(text("SELECT CAST(pg_current_snapshot() AS text)")).scalar_one())

    def close(self) -> None:
        """Give the connection back."""
        if self._connection is not None:
            self._connection.close()
