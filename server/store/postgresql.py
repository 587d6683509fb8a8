"""What connections to PostgreSQL are told: nobody waits for ever for a lock, a statement, or a peer that vanished."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy.engine import URL


@dataclass(frozen=True)
class Timeouts:
    """How long a transaction may be in the way of others, and wait for them."""

    lock_s: float = 3.0  # for another transaction's lock
    statement_s: float = 30.0
    idle_in_transaction_s: float = 15.0  # after that the server ends the session and frees its locks
    snapshot_idle_s: float = 600.0  # an export computes and writes files between two statements; it holds no locks


LAST_LOCK = 0x4469_7354  # the advisory lock under which rows are added last
_MIGRATION_LOCK = 0x4469_7355  # the one of the process that migrates
_SILENCE_S = 30  # a peer that acknowledges nothing for this long is gone
# What a transaction that migrates says first.
MIGRATION = (
    "SET LOCAL statement_timeout = 0",
    "SET LOCAL idle_in_transaction_session_timeout = 0",
    "SET LOCAL lock_timeout = '10min'",  # for another migration to finish
    f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})",
    # For tables that coordinators use: whoever waits for a table stops all who come after.
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
    """The arguments of `psycopg.connect`; what the address itself says takes precedence."""
    settings = {
        "lock_timeout": f"{timeouts.lock_s * 1000:.0f}",
        "statement_timeout": f"{timeouts.statement_s * 1000:.0f}",
        "idle_in_transaction_session_timeout": f"{timeouts.idle_in_transaction_s * 1000:.0f}",
        # The server's side of the connection: its defaults notice a vanished client after two hours.
        "tcp_keepalives_idle": "15",
        "tcp_keepalives_interval": "5",
        "tcp_keepalives_count": "3",
    }
    given = url.query.get("options", ())
    own = [given] if isinstance(given, str) else given
    options = " ".join([*(f"-c {name}={value}" for name, value in settings.items()), *own])  # the last one counts
    return {name: value for name, value in _CONNECT.items() if name not in url.query} | {"options": options}


def unhurried(timeouts: Timeouts) -> list[str]:
    """What a transaction that reads much says first: it may take its time."""
    return [
        "SET LOCAL statement_timeout = 0",
        f"SET LOCAL idle_in_transaction_session_timeout = {timeouts.snapshot_idle_s * 1000:.0f}",
    ]
