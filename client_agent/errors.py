"""What can go wrong at a site.

DistransError
├── DataError        images, classes or files that cannot be used
├── StateError       a state folder that is missing, foreign, damaged or in use
├── Refused          the coordinator rejects this request, now or later
├── OtherProtocol    a response of a coordinator of another release, which this agent cannot read
├── UnusableModel    a model that cannot be fetched or is not what the plan says; the next one may be
└── AgentEnded       this agent's part is over for good: revoked, left, cancelled
    └── TokenRefused    … or until it has another token
"""

from enum import StrEnum

from shared import versions
from shared.problems import DistransError


class DataError(DistransError):
    """Images, classes or files that cannot be used."""

    code = "data"


class StateError(DistransError):
    """A state folder that is missing, foreign, damaged or in use."""

    code = "state"


class Refused(DistransError):
    """The coordinator rejects this request, now or later; `code` is its own."""

    def __init__(self, status: int, code: str, message: str, next_step: str | None = None) -> None:
        super().__init__(message, next_step=next_step)
        self.status, self.code = status, code


class OtherProtocol(DistransError):
    """A response of a coordinator of another release, which this agent cannot read."""

    code = "protocol-mismatch"

    def __init__(self, spoken: int) -> None:
        is_newer = spoken > versions.PROTOCOL
        super().__init__(
            f"{versions.who_upgrades(spoken, versions.PROTOCOL)} Its answer cannot be read here.",
            next_step="pip install --upgrade distrans" if is_newer else "Ask its operator.",
        )


class UnusableModel(DistransError):
    """A model that cannot be fetched, or whose tensors are not those of the plan."""

    code = "unusable-model"


class Ending(StrEnum):
    """Why an agent's part in the federation is over for good."""

    REVOKED = "revoked"
    LEFT = "left"
    INVALID_TOKEN = "invalid-token"  # noqa: S105 - the name of a reason
    CANCELLED = "cancelled"


class AgentEnded(DistransError):
    """This agent's part is over for good: a restart would not change that."""

    code = "ended"
    exit_code = 3  # deploy/systemd/distrans-agent.service does not restart after it

    def __init__(self, ending: Ending, message: str, next_step: str | None = None) -> None:
        super().__init__(message, next_step=next_step)
        self.ending = ending


class TokenRefused(AgentEnded):
    """The coordinator does not know this agent's token (any more); with another one its part goes on."""

    def __init__(self, token: str, message: str) -> None:
        super().__init__(
            Ending.INVALID_TOKEN,
            message,
            "Ask its operator for a new token, and give it to: distrans-agent token. "
            "If the federation was deleted, join another one with a new invite.",
        )
        self.token = token


class Stopped(Exception):
    """The agent was asked to stop."""
