"""What can go wrong in a use case, each kind with a stable code. `server.api.errors` alone knows their HTTP statuses.

CoordinatorError
├── NotAuthenticated   no token, or one that is not valid
├── NotAllowed         a valid token that may not do this
├── NotFound           nothing of that name, or nothing that this caller may see
├── Conflict           the present state does not allow it
├── Gone               it was possible once and will not be again
├── TooLarge           more bytes than the plan allows
├── InvalidInput       a body or parameter that cannot be used
└── TooMany            slow down; `retry_after_s` says for how long
"""

from shared.problems import DistransError


class CoordinatorError(DistransError):
    """Base of the errors that a use case answers with."""

    def __init__(self, code: str, message: str, *, next_step: str | None = None) -> None:
        super().__init__(message, next_step=next_step)
        self.code = code


class NotAuthenticated(CoordinatorError):
    """No token, or one that is not valid."""


class NotAllowed(CoordinatorError):
    """A valid token that may not do this."""


class NotFound(CoordinatorError):
    """Nothing of that name, or nothing that this caller may see."""


class Conflict(CoordinatorError):
    """The present state does not allow it."""


class Gone(CoordinatorError):
    """It was possible once and will not be again."""


class TooLarge(CoordinatorError):
    """More bytes than the plan allows."""


class InvalidInput(CoordinatorError):
    """A body or parameter that cannot be used."""


class TooMany(CoordinatorError):
    """The caller should slow down."""

    def __init__(self, code: str, message: str, *, retry_after_s: int) -> None:
        super().__init__(code, message, next_step=f"Try again in {retry_after_s} s.")
        self.retry_after_s = retry_after_s
