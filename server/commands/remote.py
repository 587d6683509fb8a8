"""The coordinator as commands with --server see it: its REST API. Imports neither torch nor the database."""

import time
from collections.abc import Iterable
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError
from typing_extensions import override

from server.commands.coordinator import Coordinator
from shared.contract.errors import DistransError
from shared.contract.messages import (
    AuditView,
    ClientView,
    FederationView,
    InviteAnswer,
    InviteRequest,
    InviteView,
    Problem,
    RoundView,
    TokenAnswer,
)
from shared.contract.plan import FederationPlan
from shared.http.client import explain, open_client, request
from shared.http.client_connection import Connection
from shared.system.secrets import ask_secret, read_secret, secret

View = TypeVar("View", bound=BaseModel)
Result = TypeVar("Result")
_READ_S = 300.0  # creating a federation with a large network takes a while
_PAGE = 1000  # audit log entries per request
_TRANSIENT_STATUSES = (429, 502, 503, 504)  # busy, stopping, or down behind a proxy
# The next steps of these codes come from server.__main__; the API's are meant for programs.
_OWN_NEXT_STEPS = ("no-such-federation", "no-such-client", "no-such-invite", "invalid-token")


class Unreachable(DistransError):
    """The coordinator does not respond, but may do so later."""

    code = "unreachable"


class Refusal(DistransError):
    """The coordinator refused the request; `code` is from its response."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail, next_step=None if problem.code in _OWN_NEXT_STEPS else problem.next_step)
        self.code = problem.code


class RemoteCoordinator(Coordinator):
    """Calls the API with the admin token."""

    def __init__(self, connection: Connection, token: str) -> None:
        self._http = open_client(connection, token, program="distrans-server", read_s=_READ_S)
        self._now = time.time

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _call(self, method: str, path: str, **options: Any) -> bytes:
        try:
            response = request(self._http, method, path, **options)
        except httpx.HTTPError as error:
            found = explain(error)
            raise Unreachable(
                f"The coordinator cannot be reached: {found.cause}.", next_step=found.next_step
            ) from error
        self._note_time(response)
        if response.is_success:
            return response.content
        raise _refusal(response)

    def _note_time(self, response: httpx.Response) -> None:
        """Take the coordinator's time from the response, because this machine's clock may differ."""
        try:
            ahead_s = parsedate_to_datetime(response.headers.get("date", "")).timestamp() - time.time()
        except ValueError:
            return
        self._now = lambda: time.time() + ahead_s

    def _one(self, kind: type[View], method: str, path: str, **options: Any) -> View:
        return _parsed(TypeAdapter(kind), self._call(method, path, **options))

    def _many(self, kind: type[View], path: str, **params: Any) -> list[View]:
        answer: TypeAdapter[list[View]] = TypeAdapter(list[kind])  # type: ignore[valid-type]  # known only at run time
        return _parsed(answer, self._call("GET", path, params=params))

    @override
    def now(self) -> float:
        return self._now()

    @override
    def create(self, plan: FederationPlan, weights: Path | None) -> None:
        if weights is not None:
            raise DistransError(
                "--weights needs the coordinator's database and does not work with --server.",
                next_step="Create the federation on the coordinator's machine, without --server.",
            )
        self._call("POST", "/v1/federations", json=plan.model_dump(mode="json"))

    @override
    def federations(self) -> list[FederationView]:
        return self._many(FederationView, "/v1/federations")

    @override
    def federation(self, name: str) -> FederationView:
        return self._one(FederationView, "GET", _path(name))

    @override
    def clients(self, name: str) -> list[ClientView]:
        return self._many(ClientView, _path(name, "clients"))

    @override
    def rounds(self, name: str, after: int, limit: int) -> list[RoundView]:
        return self._many(RoundView, _path(name, "rounds"), after=after, limit=limit)

    @override
    def change(self, name: str, action: str) -> FederationView:
        return self._one(FederationView, "POST", _path(name, action))

    @override
    def rollback(self, name: str, to: int) -> FederationView:
        return self._one(FederationView, "POST", _path(name, "rollback"), json={"to": to})

    @override
    def delete(self, name: str) -> None:
        self._call("DELETE", _path(name), params={"confirm": name})

    @override
    def invite(self, name: str, expires_in_s: float, note: str) -> InviteAnswer:
        body = InviteRequest(expires_in_s=expires_in_s, note=note).model_dump()
        return self._one(InviteAnswer, "POST", _path(name, "invites"), json=body)

    @override
    def invites(self, name: str) -> list[InviteView]:
        return self._many(InviteView, _path(name, "invites"))

    @override
    def revoke_invite(self, name: str, invite: str) -> None:
        self._call("DELETE", _path(name, "invites", invite))

    @override
    def revoke_client(self, name: str, client: str) -> None:
        self._call("POST", _path(name, "clients", client, "revoke"))

    @override
    def rotate_client(self, name: str, client: str) -> TokenAnswer:
        return self._one(TokenAnswer, "POST", _path(name, "clients", client, "rotate"))

    @override
    def audit(self, federation: str | None = None) -> Iterable[AuditView]:
        chosen, last = {} if federation is None else {"federation": federation}, 0
        while page := self._many(AuditView, "/v1/audit", after=last, limit=_PAGE, **chosen):
            yield from page
            last = page[-1].id


def _path(*parts: str) -> str:
    return "/v1/federations/" + "/".join(quote(part, safe="") for part in parts)


def _parsed(adapter: TypeAdapter[Result], content: bytes) -> Result:
    try:
        return adapter.validate_json(content)
    except ValidationError as error:
        raise _not_a_coordinator("its response cannot be read") from error


def _refusal(response: httpx.Response) -> DistransError:
    status = response.status_code
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        if status not in _TRANSIENT_STATUSES:
            return _not_a_coordinator(f"it responded with status {status}")
        return Unreachable(
            f"The coordinator cannot be reached: a proxy responded with status {status}.",
            next_step="Check that the coordinator is running.",
        )
    if status in _TRANSIENT_STATUSES:
        return Unreachable(problem.detail, next_step=problem.next_step)
    return Refusal(problem)


def _not_a_coordinator(why: str) -> DistransError:
    return DistransError(
        f"The server is not a coordinator of this release: {why}.",
        next_step="Check --server and any proxies, and upgrade the older of the two programs.",
    )


def admin_token(file: Path | None) -> str:
    """Return the admin token from --admin-token-file, the environment or a prompt; never from the command line."""
    found = secret("DISTRANS_ADMIN_TOKEN") if file is None else read_secret(file)
    if found is None:
        found = ask_secret("Admin token")
    if not found or not (found.isascii() and found.isprintable()):
        raise DistransError(
            "--server needs the coordinator's admin token."
            if not found
            else "The admin token is not a single line of text.",
            next_step="Set DISTRANS_ADMIN_TOKEN or DISTRANS_ADMIN_TOKEN_FILE, or pass --admin-token-file.",
        )
    return found
