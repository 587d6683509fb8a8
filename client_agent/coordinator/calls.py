"""Calls for the command line, without retries: the user can run the command again."""

from dataclasses import dataclass
from typing import Any

import httpx

from client_agent.coordinator.outcomes import error_from_response, parse
from shared.contract import versions
from shared.contract.errors import DistransError
from shared.contract.messages import ClientView, FederationPlanAnswer, JoinAnswer, JoinRequest, TokenAnswer
from shared.contract.plan import StoredPlan
from shared.http.client import explain, request


@dataclass(frozen=True)
class InvitePreview:
    """What an invite is for."""

    plan: StoredPlan
    takes_attempts: bool  # coordinators from before the protocol header reject a join that carries one


def preview_invite(http: httpx.Client, attempt: str | None = None) -> InvitePreview:
    """Return the plan behind the invite that `http` carries; a used invite needs the attempt that used it."""
    response = _call(http, "GET", "/v1/join", params={} if attempt is None else {"attempt": attempt})
    return InvitePreview(parse(FederationPlanAnswer, response).plan, versions.HEADER in response.headers)


def join(http: httpx.Client, body: JoinRequest) -> JoinAnswer:
    """Enroll with the invite that `http` carries."""
    return parse(JoinAnswer, _call(http, "POST", "/v1/join", json=body.model_dump(exclude_none=True)))


def own_record(http: httpx.Client) -> ClientView:
    """Return the client whose token `http` carries."""
    return parse(ClientView, _call(http, "GET", "/v1/me"))


def renew_token(http: httpx.Client) -> TokenAnswer:
    """Return a new token; the old one stays valid until the new one is used."""
    return parse(TokenAnswer, _call(http, "POST", "/v1/me/token"))


def leave(http: httpx.Client) -> None:
    """Leave the federation."""
    _call(http, "DELETE", "/v1/me")


def _call(http: httpx.Client, method: str, url: str, **options: Any) -> httpx.Response:
    try:
        response = request(http, method, url, **options)
    except httpx.HTTPError as error:
        found = explain(error)
        raise DistransError(f"The coordinator cannot be reached: {found.cause}.", next_step=found.next_step) from error
    if not response.is_success:
        raise error_from_response(response, response.content)
    return response
