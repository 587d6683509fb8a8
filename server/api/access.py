"""Who is calling: the admin, a client, the holder of an invite, or a scraper."""

import hmac
from dataclasses import dataclass
from typing import Annotated, Protocol

from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers

from server.core.errors import Conflict, InvalidInput, NotAllowed, NotAuthenticated, NotFound
from server.service import client_tokens, invites
from server.service.context import Actor, Context, Identity
from server.service.settings import Settings
from shared.contract import versions
from shared.http.addresses import is_within
from shared.http.server_protocol import CERTIFICATE

# Only documents the header; `bearer_token` reads it.
_bearer = HTTPBearer(auto_error=False, description="An admin, client or invite token.")
Documented = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


async def get_context(request: Request) -> Context:
    """Return the context of this process."""
    return request.app.state.ctx  # type: ignore[no-any-return]


Ctx = Annotated[Context, Depends(get_context)]


def address_of(request: Request) -> str:
    """Return the caller's address; behind a trusted proxy, the one it forwarded."""
    return request.client.host if request.client else ""


def certificate_of(request: Request) -> str | None:
    """Return the fingerprint of the certificate the caller presented to us or to a trusted proxy."""
    return request.scope.get(CERTIFICATE)


def bearer_token(headers: Headers) -> str | None:
    """Return the bearer token of a request, if it has one."""
    scheme, _, token = headers.get("authorization", "").strip().partition(" ")
    return (token.strip() or None) if scheme.lower() == "bearer" else None


def require_protocol(request: Request) -> int:
    """Return the caller's protocol version; raise Conflict if it is not supported."""
    text = request.headers.get(versions.HEADER)
    spoken = versions.read_version(text)
    if spoken is None:
        raise InvalidInput("invalid-protocol", f"{versions.HEADER}: {text!r} is not a protocol version.")
    if spoken > versions.PROTOCOL:
        raise Conflict(
            "protocol-mismatch",
            versions.who_upgrades(versions.PROTOCOL, spoken),
            next_step="Ask the operator to upgrade the coordinator, or install an older agent for now.",
        )
    if spoken < versions.OLDEST_AGENT:
        raise Conflict(
            "protocol-mismatch",
            versions.who_upgrades(versions.PROTOCOL, spoken),
            next_step="Install a current agent at the site: pip install --upgrade distrans",
        )
    return spoken


class Authenticated(Protocol):
    """A caller with a valid token."""

    @property
    def key(self) -> str:
        """The key under which limits count it."""

    @property
    def is_agent(self) -> bool:
        """Whether it is an agent, whose protocol version must be supported."""


@dataclass(frozen=True)
class Caller:
    """The admin or a client."""

    actor: Actor
    identity: Identity | None = None  # None: the admin

    @property
    def key(self) -> str:
        """The key under which limits count it: the same for every token the client ever has."""
        return self.identity.client_id if self.identity else "admin"

    @property
    def is_agent(self) -> bool:
        """Whether it is a client, not the admin."""
        return self.identity is not None

    @property
    def only_client(self) -> str | None:
        """The only client whose rows the caller may see; None for the admin, who sees everything."""
        return self.identity.client_id if self.identity else None


@dataclass(frozen=True)
class Invited:
    """The holder of an invite."""

    token: str
    is_agent: bool = True

    @property
    def key(self) -> str:
        """The key under which limits count it: the invite's id."""
        return self.token.rpartition("_")[0]


@dataclass(frozen=True)
class Scraper:
    """A program that reads the metrics."""

    key: str = "scraper"
    is_agent: bool = False


def is_admin_token(token: str, address: str, settings: Settings) -> bool:
    """Return whether this is the admin token; raise NotAllowed if it comes from outside the admin networks."""
    if not hmac.compare_digest(token.encode(), settings.admin_token.encode()):
        return False
    if settings.admin_networks and not is_within(address, settings.admin_networks):
        raise NotAllowed(
            "admin-network",
            f"The admin token is not accepted from {address or 'this address'}.",
            next_step="Call from one of the networks in DISTRANS_ADMIN_NETWORKS.",
        )
    return True


async def authenticate_caller(request: Request, token: str) -> Caller:
    """Return the admin or the active client that holds the token."""
    address, ctx = address_of(request), request.app.state.ctx
    if is_admin_token(token, address, request.app.state.settings):
        return Caller(Actor("admin", address))
    certificate = certificate_of(request)
    identity = client_tokens.authenticate_at_once(ctx, token, certificate)
    if identity is None:
        identity = await run_in_threadpool(client_tokens.authenticate, ctx, token, certificate)
    return Caller(Actor(f"client:{identity.name}", address), identity)


async def authenticate_invited(request: Request, token: str) -> Invited:
    """Return the holder of an invite that is still open, or whose join its site may repeat."""
    await run_in_threadpool(invites.check_holder, request.app.state.ctx, token)
    return Invited(token)


async def authenticate_scraper(request: Request, token: str) -> Scraper:
    """Return a scraper that holds the scrape token or the admin token."""
    settings: Settings = request.app.state.settings
    wanted = settings.scrape_token
    is_scraper = wanted is not None and hmac.compare_digest(token.encode(), wanted.encode())
    if not is_scraper and not is_admin_token(token, address_of(request), settings):
        raise NotAuthenticated("invalid-token", "The token is not valid.", next_step="Use the admin or scrape token.")
    return Scraper()


async def any_caller(request: Request, _documented: Documented) -> Caller:
    """Return the authenticated caller: the admin or an active client."""
    return request.state.caller  # type: ignore[no-any-return]


AnyCaller = Annotated[Caller, Depends(any_caller)]


async def admin_only(caller: AnyCaller) -> Caller:
    """Return the caller if it is the admin, else raise NotAllowed."""
    if caller.identity is not None:
        raise NotAllowed("admin-only", "Only the operator may do this.")
    return caller


async def client_only(caller: AnyCaller) -> Identity:
    """Return the client's identity; raise NotAllowed for the admin."""
    if caller.identity is None:
        raise NotAllowed("client-only", "This call requires a client token, not the admin token.")
    return caller.identity


Admin = Annotated[Caller, Depends(admin_only)]
ClientIdentity = Annotated[Identity, Depends(client_only)]


async def may_see(name: str, caller: AnyCaller) -> Caller:
    """Return the admin or a client of the federation in the path; for others that federation does not exist."""
    if caller.identity is not None and caller.identity.federation != name:
        raise NotFound("no-such-federation", f"There is no federation {name!r}.")
    return caller


Member = Annotated[Caller, Depends(may_see)]


async def invited(request: Request, _documented: Documented) -> Invited:
    """Return the authenticated holder of an invite."""
    return request.state.caller  # type: ignore[no-any-return]


InviteHolder = Annotated[Invited, Depends(invited)]
