"""Errors of use cases, each with a stable code. Only `server.api.errors` maps them to HTTP statuses.

CoordinatorError
├── NotAuthenticated   missing or invalid token
├── NotAllowed         valid token, but not for this
├── NotFound           no such thing, or none the caller may see
├── Conflict           the current state does not allow it
├── Gone               no longer possible, and never again
├── TooLarge           more bytes than the plan allows
├── InvalidInput       unusable body or parameter
└── TooMany            slow down; `retry_after_s` says for how long
"""

from collections.abc import Sequence

from shared.contract.errors import DistransError


class CoordinatorError(DistransError):
    """Base of all use-case errors."""

    def __init__(self, code: str, message: str, *, next_step: str | None = None) -> None:
        super().__init__(message, next_step=next_step)
        self.code = code


class NotAuthenticated(CoordinatorError):
    """Missing or invalid token."""


class NotAllowed(CoordinatorError):
    """Valid token, but not for this."""


class NotFound(CoordinatorError):
    """No such thing, or none the caller may see."""


class Conflict(CoordinatorError):
    """The current state does not allow it."""


class Gone(CoordinatorError):
    """No longer possible, and never again."""


class TooLarge(CoordinatorError):
    """More bytes than the plan allows."""


class InvalidInput(CoordinatorError):
    """Unusable body or parameter."""


class TooMany(CoordinatorError):
    """The caller must slow down."""

    def __init__(self, code: str, message: str, *, retry_after_s: int) -> None:
        super().__init__(code, message, next_step=f"Try again in {retry_after_s} s.")
        self.retry_after_s = retry_after_s


def short_list(items: Sequence[object], limit: int, *, last: bool = False) -> str:
    """Join the first (or last) `limit` items with commas for a message; "…" stands for the others."""
    if len(items) <= limit:
        return ", ".join(map(str, items))
    return f"… {', '.join(map(str, items[-limit:]))}" if last else f"{', '.join(map(str, items[:limit]))} …"
