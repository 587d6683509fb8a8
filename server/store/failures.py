"""Classifies storage errors: disk full, or busy; anything else means the database is unavailable."""

import sqlite3

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from shared.contract.errors import DistransError

_FULL_STATE = "53100"
_BUSY_STATES = {
    "55P03",  # lock_timeout
    "57014",  # statement_timeout
    "25P03",  # idle_in_transaction_session_timeout
    "40P01",  # deadlock
    "40001",  # serialization failure
    "53300",  # too many connections
}


class StorageFull(DistransError):
    """No space left for tensors."""

    code = "storage-full"


def is_full(error: BaseException) -> bool:
    """Return whether the database reported a full disk or quota."""
    return _state(error) == _FULL_STATE or _sqlite_code(error) == sqlite3.SQLITE_FULL


def is_io_error(error: BaseException) -> bool:
    """Return whether SQLite failed to read or write a file. A full disk can cause this too, e.g. in -shm."""
    return _sqlite_code(error) == sqlite3.SQLITE_IOERR


def is_busy(error: BaseException) -> bool:
    """Return whether other transactions were in the way, so that a retry may succeed."""
    return (
        isinstance(error, PoolTimeout)
        or _state(error) in _BUSY_STATES
        or _sqlite_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    )


def _cause(error: BaseException) -> BaseException | None:
    return error.orig if isinstance(error, DBAPIError) else error


def _state(error: BaseException) -> str | None:
    return getattr(_cause(error), "sqlstate", None)


def _sqlite_code(error: BaseException) -> int | None:
    """Return the primary result code, which is the lowest byte of an extended one."""
    code = getattr(_cause(error), "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
