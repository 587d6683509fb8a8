"""What a storage error means: no room left, somebody else in the way, or, if neither, a database that is away."""

import sqlite3

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from shared.problems import DistransError

_FULL_STATE = "53100"
_BUSY_STATES = {
    "55P03",  # lock_timeout
    "57014",  # statement_timeout
    "25P03",  # idle_in_transaction_session_timeout
    "40P01",  # a deadlock
    "40001",  # a serialization failure
    "53300",  # too many connections
}


class StorageFull(DistransError):
    """There is no room for more tensors."""

    code = "storage-full"


def is_full(error: BaseException) -> bool:
    """Whether the database reported that its disk, or its quota, is full."""
    return _state(error) == _FULL_STATE or _sqlite_code(error) == sqlite3.SQLITE_FULL


def is_io_error(error: BaseException) -> bool:
    """Whether SQLite failed to read or write a file. A full disk can look like this too, for example in -shm."""
    return _sqlite_code(error) == sqlite3.SQLITE_IOERR


def is_busy(error: BaseException) -> bool:
    """Whether others were in the way, so that the same request may well succeed soon."""
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
    """The primary result code; the extended ones carry it in their lowest byte."""
    code = getattr(_cause(error), "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
