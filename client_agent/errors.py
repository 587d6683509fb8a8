"""What can go wrong at a site.

DistransError
├── DataError        images, classes or files that cannot be used
├── StateError       a state folder that is missing, foreign or in use
├── Refused          the coordinator will not have this request, now or later
├── ForeignAnswer    an answer that is not a coordinator's
└── AgentEnded       this agent's part is over: revoked, or the federation was cancelled
"""

from shared.problems import DistransError


class DataError(DistransError):
    """Images, classes or files that cannot be used."""

    code = "data"


class StateError(DistransError):
    """A state folder that is missing, foreign or in use."""

    code = "state"


class Refused(DistransError):
    """The coordinator will not have this request, now or later; `code` is its own."""

    def __init__(self, status: int, code: str, message: str, next_step: str | None = None) -> None:
        super().__init__(message, next_step=next_step)
        self.status, self.code = status, code


class ForeignAnswer(DistransError):
    """An answer that is not a coordinator's, such as the page of a proxy on the way."""

    code = "foreign-answer"

    def __init__(self, status: int) -> None:
        super().__init__(
            f"What answered ({status}) is not a coordinator.",
            next_step="Check --server, and proxies on the way: they may also ask for a client certificate.",
        )


class AgentEnded(DistransError):
    """This agent's part is over."""

    code = "ended"


class Stopped(Exception):
    """The agent was asked to stop."""
