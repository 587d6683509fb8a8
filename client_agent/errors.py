"""Errors at a site.

DistransError
├── DataError           images, classes or files that cannot be used
├── StateError          a state folder that is missing, foreign, damaged or in use
├── RequestRefused      the coordinator rejected a request; repeating it would not help
├── ProtocolMismatch    a response from a coordinator of another release that this agent cannot read
├── ForeignUrl          the coordinator named a URL that is not its own
├── UnusableModel       a model that cannot be downloaded or does not match the plan; the next one may
└── AgentEnded          the agent's part in the federation is over: revoked, left, cancelled
    └── TokenRefused    … unless it gets another token
"""

from enum import StrEnum

from shared.contract import versions
from shared.contract.errors import DistransError


class DataError(DistransError):
    """Images, classes or files that cannot be used."""

    code = "data"


class StateError(DistransError):
    """A state folder that is missing, foreign, damaged or in use."""

    code = "state"


class RequestRefused(DistransError):
    """A request that the coordinator rejected; `code` is the coordinator's."""

    def __init__(self, status: int, code: str, message: str, next_step: str | None = None) -> None:
        super().__init__(message, next_step=next_step)
        self.status, self.code = status, code


class ProtocolMismatch(DistransError):
    """A response from a coordinator of another release that this agent cannot read."""

    code = "protocol-mismatch"

    def __init__(self, spoken: int) -> None:
        is_newer = spoken > versions.PROTOCOL
        super().__init__(
            f"{versions.who_upgrades(spoken, versions.PROTOCOL)} This agent cannot read its answer.",
            next_step="pip install --upgrade distrans" if is_newer else "Ask its operator.",
        )


class ForeignUrl(DistransError):
    """A URL from the coordinator that is malformed or on another server."""

    code = "foreign-url"


class UnusableModel(DistransError):
    """A model that cannot be downloaded, or whose tensors do not match the plan."""

    code = "unusable-model"


class Ending(StrEnum):
    """Why an agent's part in the federation is over."""

    REVOKED = "revoked"
    LEFT = "left"
    INVALID_TOKEN = "invalid-token"  # noqa: S105 - the name of a reason
    CANCELLED = "cancelled"


class AgentEnded(DistransError):
    """The end of this agent's part in the federation; restarting the agent changes nothing."""

    code = "ended"
    exit_code = 3  # deploy/systemd/distrans-agent.service does not restart after it

    def __init__(self, ending: Ending, message: str, next_step: str | None = None) -> None:
        super().__init__(message, next_step=next_step)
        self.ending = ending


class TokenRefused(AgentEnded):
    """A token that the coordinator does not accept, or no longer accepts; the agent resumes with another one."""

    def __init__(self, token: str, message: str) -> None:
        super().__init__(
            Ending.INVALID_TOKEN,
            message,
            "Ask its operator for a new token, and give it to: distrans-agent token. "
            "If the federation was deleted, join another one with a new invite.",
        )
        self.token = token


class StopRequested(Exception):
    """The agent was asked to stop."""


def describe_error(error: BaseException) -> str:
    """Return an error as a sentence; the type is named unless the message was written for people."""
    return str(error) if isinstance(error, DistransError) else f"{type(error).__name__}: {error}."
