"""Who is calling: the admin, a client, or nobody we know."""

import hmac
import ipaddress
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from server.core.errors import NotAllowed, NotAuthenticated, NotFound, TooMany
from server.service.context import Actor, Context
from server.service.enrolment import Identity, authenticate
from server.settings import Settings
from shared.http.protocol import CERTIFICATE

_bearer = HTTPBearer(auto_error=False, description="The admin's, a client's or an invite's token.")
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


class FailureThrottle:
    """Slows down an address that keeps presenting bad tokens; good ones pass, whoever shares the address."""

    def __init__(self, free_failures: int = 10, forget_s: float = 300, max_addresses: int = 10_000) -> None:
        self._free, self._forget_s, self._max = free_failures, forget_s, max_addresses
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def note_failure(self, address: str) -> None:
        """Count a failure; raises TooMany when there were too many of late."""
        now = time.monotonic()
        count, last = self._failures.pop(address, (0, now))
        count = 1 if now - last > self._forget_s else count + 1
        self._failures[address] = (count, now)
        if len(self._failures) > self._max:
            self._failures.popitem(last=False)
        if count > self._free:
            wait = min(2 ** min(count - self._free, 10), int(self._forget_s))
            raise TooMany("too-many-failures", "Too many requests with a bad token.", retry_after_s=wait)


def get_context(request: Request) -> Context:
    """The process' context."""
    return request.app.state.ctx  # type: ignore[no-any-return]


Ctx = Annotated[Context, Depends(get_context)]


def address_of(request: Request) -> str:
    """Where the request comes from; behind a proxy, what the proxy says."""
    return request.client.host if request.client else ""


def certificate_of(request: Request) -> str | None:
    """The fingerprint of the certificate that the caller has shown, to us or to a trusted proxy."""
    return request.scope.get(CERTIFICATE)


@dataclass(frozen=True)
class Caller:
    """The admin, or a client."""

    actor: Actor
    identity: Identity | None = None  # None: the admin

    @property
    def only_client(self) -> str | None:
        """The client whose rows alone may be shown; None for the admin, who sees all."""
        return self.identity.client_id if self.identity else None


def bearer(credentials: Credentials) -> str:
    """The token of the request."""
    if credentials is None:
        raise NotAuthenticated(
            "no-token", "This call needs a token.", next_step="Send it as Authorization: Bearer TOKEN."
        )
    return credentials.credentials


def is_admin_token(token: str, address: str, settings: Settings) -> bool:
    """Whether it is; one that comes from outside the networks that it is taken from is refused."""
    if not hmac.compare_digest(token.encode(), settings.admin_token.encode()):
        return False
    if settings.admin_networks and not _is_within(address, settings.admin_networks):
        raise NotAllowed(
            "admin-network",
            f"The admin token is not taken from {address or 'this address'}.",
            next_step="Call from one of the operator's networks (DISTRANS_ADMIN_NETWORKS).",
        )
    return True


def _is_within(address: str, networks: tuple[str, ...]) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return any(found in ipaddress.ip_network(network) for network in networks)


def any_caller(request: Request, ctx: Ctx, credentials: Credentials) -> Caller:
    """The admin or an active client."""
    token = bearer(credentials)
    settings: Settings = request.app.state.settings
    address = address_of(request)
    if is_admin_token(token, address, settings):
        return Caller(Actor("admin", address))
    try:
        identity = authenticate(ctx, token, certificate_of(request))
    except NotAuthenticated:
        request.app.state.throttle.note_failure(address)
        raise
    return Caller(Actor(f"client:{identity.name}", address), identity)


AnyCaller = Annotated[Caller, Depends(any_caller)]


def admin_only(caller: AnyCaller) -> Caller:
    """The admin."""
    if caller.identity is not None:
        raise NotAllowed("admin-only", "Only the operator may do this.")
    return caller


def client_only(caller: AnyCaller) -> Identity:
    """An active client."""
    if caller.identity is None:
        raise NotAllowed("client-only", "This call is for clients; the admin token cannot stand in for one.")
    return caller.identity


Admin = Annotated[Caller, Depends(admin_only)]
ClientIdentity = Annotated[Identity, Depends(client_only)]


def may_see(name: str, caller: AnyCaller) -> Caller:
    """The admin, or a client of the federation named in the path; to others it does not exist."""
    if caller.identity is not None and caller.identity.federation != name:
        raise NotFound("no-such-federation", f"There is no federation {name!r}.")
    return caller


Member = Annotated[Caller, Depends(may_see)]
