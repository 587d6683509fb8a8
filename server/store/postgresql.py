"""Connection settings for PostgreSQL: bounded waits for locks, statements and vanished peers."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy.engine import URL


@dataclass(frozen=True)
class Timeouts:
    """How long a transaction may block others, and wait for them."""

    lock_s: float = 3.0  # waiting for a lock
    statement_s: float = 30.0
    idle_in_transaction_s: float = 15.0  # then the server ends the session and frees its locks
    snapshot_idle_s: float = 600.0  # an export writes files between statements; it holds no locks


LAST_LOCK = 0x4469_7354  # advisory lock of `database.add_last`
_MIGRATION_LOCK = 0x4469_7355  # advisory lock of migrations
_SILENCE_S = 30  # a peer that acknowledges nothing for this long counts as gone
# First statements of a migration.
MIGRATION = (
    "SET LOCAL statement_timeout = 0",
    "SET LOCAL idle_in_transaction_session_timeout = 0",
    "SET LOCAL lock_timeout = '10min'",  # waiting for another migration
    f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})",
    # For tables in use: a waiting migration blocks every later query on the table.
    "SET LOCAL lock_timeout = '10s'",
)
_CONNECT: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": _SILENCE_S * 1000,
}


def connect_args(url: URL, timeouts: Timeouts) -> dict[str, Any]:
    """Return the arguments of `psycopg.connect`; options in the URL take precedence."""
    settings = {
        "lock_timeout": f"{timeouts.lock_s * 1000:.0f}",
        "statement_timeout": f"{timeouts.statement_s * 1000:.0f}",
        "idle_in_transaction_session_timeout": f"{timeouts.idle_in_transaction_s * 1000:.0f}",
        # The server's side: by default it notices a vanished client only after two hours.
        "tcp_keepalives_idle": "15",
        "tcp_keepalives_interval": "5",
        "tcp_keepalives_count": "3",
    }
    given = url.query.get("options", ())
    own = [given] if isinstance(given, str) else given
    options = " ".join([*(f"-c {name}={value}" for name, value in settings.items()), *own])  # the last one wins
    return {name: value for name, value in _CONNECT.items() if name not in url.query} | {"options": options}


def execute(cursor: Any, statement: str, parameters: Any, context: Any) -> bool:
    """Execute a statement with the option `distrans_binary` so that its result is sent as it is stored.

    By default, bytes are sent as hexadecimal digits: twice as many, and decoding them takes several times as long.
    """
    if context is None or not context.execution_options.get("distrans_binary"):
        return False  # left to SQLAlchemy
    cursor.execute(statement, parameters, binary=True)
    return True


def snapshot_setup(timeouts: Timeouts) -> list[str]:
    """Return the first statements of a snapshot, which may take long."""
    return [
        "SET LOCAL statement_timeout = 0",
        f"SET LOCAL idle_in_transaction_session_timeout = {timeouts.snapshot_idle_s * 1000:.0f}",
    ]
