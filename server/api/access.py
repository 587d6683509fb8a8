"""Who is calling: the admin, a client, the holder of an invite, a scraper, or nobody we know."""

import hmac
from dataclasses import dataclass
from typing import Annotated, Protocol

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers

from server.core.errors import Conflict, InvalidInput, NotAllowed, NotAuthenticated, NotFound
from server.service import enrolment
from server.service.context import Actor, Context
from server.service.enrolment import Identity
from server.settings import Settings
from shared import versions
from shared.http.addresses import is_within
from shared.http.protocol import CERTIFICATE

# For the OpenAPI document alone; `token_of` reads the header.
_bearer = HTTPBearer(auto_error=False, description="The admin's, a client's or an invite's token.")
Documented = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


async def get_context(request: Request) -> Context:
    """The process' context."""
    return request.app.state.ctx  # type: ignore[no-any-return]


Ctx = Annotated[Context, Depends(get_context)]


def address_of(request: Request) -> str:
    """Where the request comes from; behind a proxy, what the proxy says."""
    return request.client.host if request.client else ""


def certificate_of(request: Request) -> str | None:
    """The fingerprint of the certificate that the caller has shown, to us or to a trusted proxy."""
    return request.scope.get(CERTIFICATE)


def token_of(headers: Headers) -> str | None:
    """The bearer token of a request, if it has one; the only place that reads the header."""
    scheme, _, token = headers.get("authorization", "").strip().partition(" ")
    return (token.strip() or None) if scheme.lower() == "bearer" else None


def protocol_of(request: Request) -> int:
    """The version of the protocol that the caller speaks; raises Conflict for one that is not served here."""
    text = request.headers.get(versions.HEADER)
    spoken = versions.read_version(text)
    if spoken is None:
        raise InvalidInput("invalid-protocol", f"{versions.HEADER}: {text!r} is not a version.")
    if spoken > versions.PROTOCOL:
        raise Conflict(
            "protocol-mismatch",
            versions.who_upgrades(versions.PROTOCOL, spoken),
            next_step="Ask the operator to upgrade the coordinator, or install an older agent until then.",
        )
    if spoken < versions.OLDEST_AGENT:
        raise Conflict(
            "protocol-mismatch",
            versions.who_upgrades(versions.PROTOCOL, spoken),
            next_step="Install a current agent at the site: pip install --upgrade distrans",
        )
    return spoken


class Authenticated(Protocol):
    """Whoever has shown a good token."""

    @property
    def key(self) -> str:
        """What limits count by."""

    @property
    def is_agent(self) -> bool:
        """Whether it calls for a site, and so has to speak a version that is served."""


@dataclass(frozen=True)
class Caller:
    """The admin, or a client."""

    actor: Actor
    identity: Identity | None = None  # None: the admin

    @property
    def key(self) -> str:
        """What limits count by: the same for every token that the client ever has."""
        return self.identity.client_id if self.identity else "admin"

    @property
    def is_agent(self) -> bool:
        """All but the admin."""
        return self.identity is not None

    @property
    def only_client(self) -> str | None:
        """The client whose rows alone may be shown; None for the admin, who sees all."""
        return self.identity.client_id if self.identity else None


@dataclass(frozen=True)
class Invited:
    """The holder of an invite."""

    token: str
    is_agent: bool = True

    @property
    def key(self) -> str:
        """What limits count by: the invite's id."""
        return self.token.rpartition("_")[0]


@dataclass(frozen=True)
class Scraper:
    """A program that reads the figures."""

    key: str = "scraper"
    is_agent: bool = False


def is_admin_token(token: str, address: str, settings: Settings) -> bool:
    """Whether it is; one that comes from outside the networks that it is taken from is refused."""
    if not hmac.compare_digest(token.encode(), settings.admin_token.encode()):
        return False
    if settings.admin_networks and not is_within(address, settings.admin_networks):
        raise NotAllowed(
            "admin-network",
            f"The admin token is not taken from {address or 'this address'}.",
            next_step="Call from one of the operator's networks (DISTRANS_ADMIN_NETWORKS).",
        )
    return True


def authenticate_caller(request: Request, token: str) -> Caller:
    """The admin or an active client."""
    address = address_of(request)
    if is_admin_token(token, address, request.app.state.settings):
        return Caller(Actor("admin", address))
    identity = enrolment.authenticate(request.app.state.ctx, token, certificate_of(request))
    return Caller(Actor(f"client:{identity.name}", address), identity)


def authenticate_invited(request: Request, token: str) -> Invited:
    """The holder of an invite that can be used now, or once more by the site that has used it."""
    enrolment.check_holder(request.app.state.ctx, token)
    return Invited(token)


def authenticate_scraper(request: Request, token: str) -> Scraper:
    """Whoever has the scrape token, or the admin's."""
    settings: Settings = request.app.state.settings
    wanted = settings.scrape_token
    is_scraper = wanted is not None and hmac.compare_digest(token.encode(), wanted.encode())
    if not is_scraper and not is_admin_token(token, address_of(request), settings):
        raise NotAuthenticated("invalid-token", "The token is not valid.", next_step="Use the admin or scrape token.")
    return Scraper()


async def any_caller(request: Request, _documented: Documented) -> Caller:
    """The admin or an active client."""
    return request.state.caller  # type: ignore[no-any-return]


AnyCaller = Annotated[Caller, Depends(any_caller)]


async def admin_only(caller: AnyCaller) -> Caller:
    """The admin."""
    if caller.identity is not None:
        raise NotAllowed("admin-only", "Only the operator may do this.")
    return caller


async def client_only(caller: AnyCaller) -> Identity:
    """An active client."""
    if caller.identity is None:
        raise NotAllowed("client-only", "This call is for clients; the admin token cannot stand in for one.")
    return caller.identity


Admin = Annotated[Caller, Depends(admin_only)]
ClientIdentity = Annotated[Identity, Depends(client_only)]


async def may_see(name: str, caller: AnyCaller) -> Caller:
    """The admin, or a client of the federation named in the path; to others it does not exist."""
    if caller.identity is not None and caller.identity.federation != name:
        raise NotFound("no-such-federation", f"There is no federation {name!r}.")
    return caller


Member = Annotated[Caller, Depends(may_see)]


async def invited(request: Request, _documented: Documented) -> Invited:
    """The holder of an invite."""
    return request.state.caller  # type: ignore[no-any-return]


InviteHolder = Annotated[Invited, Depends(invited)]
