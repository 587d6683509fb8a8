"""Client tokens: authenticate, renew, rotate."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from server.core.errors import Conflict, NotAllowed, NotAuthenticated
from server.service import token_format
from server.service.audit import limit_changes, record_action
from server.service.context import Actor, Context, Identity, notify_agents
from server.service.queries import find_client_id, load_federation
from server.store.database import LOCK
from server.store.tables import Client, Federation
from shared.contract.messages import TokenAnswer


class _Holder(NamedTuple):
    """What decides whether a token is valid, and whose it is."""

    id: str
    name: str
    federation_id: int
    federation: str
    token_generation: int
    state: str
    token_hash: str
    next_token_hash: str | None
    attempt_hash: str | None
    certificate: str | None


_HOLDER = (
    select(
        Client.id,
        Client.name,
        Client.federation_id,
        Federation.name,
        Client.token_generation,
        Client.state,
        Client.token_hash,
        Client.next_token_hash,
        Client.attempt_hash,
        Client.certificate,
    )
    .join(Federation, Federation.id == Client.federation_id)
    .where(Federation.deleted_at.is_(None), Client.id == bindparam("client_id"))
)


def authenticate(ctx: Context, text: str, certificate: str | None = None) -> Identity:
    """Return the client behind a token; raise NotAllowed if it is revoked or presents the wrong certificate."""
    parts = token_format.split_token("client", text)
    if parts is None:
        raise _invalid_token()
    with ctx.db.read() as session:
        row = session.execute(_HOLDER, {"client_id": parts[0]}).first()
    holder = _checked(row, parts[1], certificate)
    if _is_first_use(holder, parts[1], certificate):
        generation = _settle(ctx, holder.id, parts[1], certificate).token_generation
        holder = holder._replace(token_generation=generation)
    return _identity_of(holder)


def authenticate_at_once(ctx: Context, text: str, certificate: str | None = None) -> Identity | None:
    """Do the same in the event loop; return None if that would have to write, or wait for the database."""
    parts = token_format.split_token("client", text)
    rows = ctx.db.quick.rows(_HOLDER, {"client_id": parts[0]}) if parts is not None else None
    if parts is None or rows is None:
        return None
    holder = _checked(rows[0] if rows else None, parts[1], certificate)
    return None if _is_first_use(holder, parts[1], certificate) else _identity_of(holder)


def _checked(row: Sequence[Any] | None, secret: str, certificate: str | None) -> _Holder:
    if row is None:
        raise _invalid_token("The token is not valid: its client is unknown or its federation was deleted.")
    holder = _Holder(*row)
    if not _is_current(holder, secret):
        raise _invalid_token()
    _require_active(holder.state)
    _require_own_certificate(holder, certificate)
    return holder


def _identity_of(holder: _Holder) -> Identity:
    return Identity(holder.id, holder.name, holder.federation_id, holder.federation, holder.token_generation)


def _require_own_certificate(client: Client | _Holder, certificate: str | None) -> None:
    """Raise unless the client presents the certificate it is bound to, if any."""
    if client.certificate not in (None, certificate):
        raise NotAllowed(
            "wrong-certificate",
            "This client's token is bound to a different certificate than the one presented.",
            next_step="Present the certificate it joined with, or ask the operator to rotate the client's token.",
        )


def _is_current(client: Client | _Holder, secret: str) -> bool:
    return token_format.matches(secret, client.token_hash) or _is_next(client, secret)


def _is_next(client: Client | _Holder, secret: str) -> bool:
    return client.next_token_hash is not None and token_format.matches(secret, client.next_token_hash)


def _is_first_use(client: Client | _Holder, secret: str, certificate: str | None) -> bool:
    """Return whether `_settle` has something to write: once per token and certificate, not with every request."""
    is_new_certificate = client.certificate is None and certificate is not None
    return client.attempt_hash is not None or is_new_certificate or _is_next(client, secret)


def _settle(ctx: Context, client_id: str, secret: str, certificate: str | None) -> Client:
    """Record the first use of a token: the join can no longer be repeated, and the token it replaces expires.

    A client without a certificate, or whose token was rotated, is bound to the first certificate it presents.
    """
    with ctx.db.write() as session:
        client = session.get(Client, client_id, with_for_update=LOCK)
        if client is None or not _is_current(client, secret):  # another request or the operator got there first
            raise _invalid_token()
        _require_own_certificate(client, certificate)
        federation = session.get_one(Federation, client.federation_id)
        actor = Actor(f"client:{client.name}")
        client.attempt_hash = None
        if client.certificate is None and certificate is not None:
            client.certificate = certificate
            record_action(session, ctx, actor, "client.bind", federation.name, certificate=certificate)
        if _is_next(client, secret):
            client.token_hash, client.next_token_hash = str(client.next_token_hash), None
            record_action(session, ctx, actor, "client.renewed", federation.name)
        return client


def require_current_client(session: Session, identity: Identity) -> Client:
    """Return the client of a long request; raise if it has since left, been revoked, or had its token rotated.

    A token that the client itself has renewed does not end a request that started with the old one.
    """
    query = select(Client).join(Federation).where(Federation.deleted_at.is_(None), Client.id == identity.client_id)
    client = session.execute(query).scalar_one_or_none()
    if client is None:
        raise deleted_federation()
    require_current(client.state, client.token_generation, identity)
    return client


def require_current(state: str, token_generation: int, identity: Identity) -> None:
    """Raise unless a client in this state, with this generation of tokens, may go on with a long request."""
    _require_active(state)
    if token_generation != identity.token_generation:
        raise _invalid_token()


def deleted_federation() -> NotAuthenticated:
    """Return the error for a client whose federation was deleted."""
    return _invalid_token("The token is not valid: its federation was deleted.")


def _invalid_token(message: str = "The token is not valid.") -> NotAuthenticated:
    return NotAuthenticated("invalid-token", message, next_step="Join with an invite to get one.")


def _require_active(state: str) -> None:
    if state != "active":
        raise NotAllowed(
            f"client-{state}",
            "This client was revoked by the operator." if state == "revoked" else "This client has left.",
            next_step="Join again with a new invite.",
        )


def renew(ctx: Context, identity: Identity, actor: Actor) -> TokenAnswer:
    """Issue a new token to the client; the current one stays valid until the new one is first used.

    A lost answer therefore locks nobody out. Asking again replaces a new token that has not been used yet.
    """
    token = token_format.new_token("client", identity.client_id)
    with ctx.db.write() as session:
        session.get(Client, identity.client_id, with_for_update=LOCK)  # the operator may be rotating the token
        client = require_current_client(session, identity)
        limit_changes(session, ctx, actor, identity.federation)
        client.next_token_hash = token.hash
        record_action(session, ctx, actor, "client.renew", identity.federation)
    return TokenAnswer(client_id=identity.client_id, token=token.text)


def rotate(ctx: Context, actor: Actor, federation_name: str, client: str) -> TokenAnswer:
    """Issue a new token for a client on behalf of the operator; the old one is invalid at once."""
    with ctx.db.write() as session:
        federation = load_federation(session, federation_name, lock=True)  # always before its clients
        row = session.get_one(
            Client, find_client_id(session, federation, client), with_for_update=LOCK, populate_existing=True
        )
        if row.state != "active":
            raise Conflict("client-not-active", f"Client {row.name!r} is {row.state}.")
        token = token_format.new_token("client", row.id)
        row.token_hash, row.certificate = token.hash, None  # bound to the next certificate presented
        row.next_token_hash = row.attempt_hash = None  # also ends a pending renewal or join
        row.token_generation += 1
        notify_agents(federation)  # ends a long poll that started with the old token
        record_action(session, ctx, actor, "client.rotate", federation_name, client=row.name)
        return TokenAnswer(client_id=row.id, token=token.text)
