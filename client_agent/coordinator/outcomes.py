"""The outcome of a request to the coordinator: done, worth a retry, or an error that says why it was refused."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from client_agent.errors import ProtocolMismatch, RequestRefused
from shared.contract import versions
from shared.contract.errors import ForeignAnswer
from shared.contract.messages import Problem

Model = TypeVar("Model", bound=BaseModel)
Value = TypeVar("Value")


@dataclass(frozen=True)
class Done(Generic[Value]):
    """A request that succeeded."""

    value: Value


@dataclass(frozen=True)
class Retry:
    """A request that may succeed later."""

    reason: str
    retry_after: str = ""  # the header, if the coordinator sent one


Outcome = Done[Value] | Retry


def retry_for(response: httpx.Response) -> Retry | None:
    """Return the retry that a response calls for; None if a retry would not help."""
    if response.status_code < 500 and response.status_code not in (408, 429):
        return None
    return Retry(f"the coordinator answered {response.status_code}", response.headers.get("retry-after", ""))


def failed(response: httpx.Response, body: bytes) -> Retry:
    """Return the retry that a failure calls for, or raise it as an error."""
    if found := retry_for(response):
        return found
    raise error_from_response(response, body)


def parsed(kind: type[Model], response: httpx.Response) -> Outcome[Model]:
    """Return the parsed answer of a success; otherwise see `failed`."""
    return Done(parse(kind, response)) if response.is_success else failed(response, response.content)


def accepted(response: httpx.Response) -> Outcome[None]:
    """Return Done for any success; otherwise see `failed`."""
    return Done(None) if response.is_success else failed(response, response.content)


def parse(kind: type[Model], response: httpx.Response) -> Model:
    """Return a message of the contract; raise ProtocolMismatch or ForeignAnswer if the response is not one."""
    try:
        return kind.model_validate_json(response.content)
    except ValidationError as error:
        raise _unreadable(response) from error


def error_from_response(response: httpx.Response, body: bytes) -> RequestRefused | ProtocolMismatch | ForeignAnswer:
    """Return the coordinator's problem as an exception; the body may come from a stream."""
    try:
        problem = Problem.model_validate_json(body)
    except ValidationError:
        return _unreadable(response)
    return RequestRefused(response.status_code, problem.code, problem.detail, problem.next_step)


def _unreadable(response: httpx.Response) -> ProtocolMismatch | ForeignAnswer:
    """Return the error for an unreadable response: from another release, or not from a coordinator."""
    spoken = versions.read_version(response.headers.get(versions.HEADER))
    if spoken is None or versions.HEADER not in response.headers or spoken == versions.PROTOCOL:
        return ForeignAnswer(response.status_code)
    return ProtocolMismatch(spoken)
