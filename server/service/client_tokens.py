"""Client tokens: authenticate, renew, rotate."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from server.core.errors import Conflict, NotAllowed, NotAuthenticated
from server.service import token_format
from server.service.audit import limit_changes, record_action
from server.service.context import Actor, Context, Identity, notify_agents
from server.service.queries import find_client_id, load_federation
from server.store.database import LOCK
from server.store.tables import Client, Federation
from shared.contract.messages import TokenAnswer


def authenticate(ctx: Context, text: str, certificate: str | None = None) -> Identity:
    """Return the client behind a token; raise NotAllowed if it is revoked or presents the wrong certificate."""
    parts = token_format.split_token("client", text)
    if parts is not None:
        with ctx.db.read() as session:
            query = select(Client, Federation.name).join(Federation).where(Federation.deleted_at.is_(None))
            row = session.execute(query.where(Client.id == parts[0])).first()
        if row is None:
            raise _invalid_token("The token is not valid: its client is unknown or its federation was deleted.")
        client, federation_name = row
        if _is_current(client, parts[1]):
            _require_active(client.state)
            _require_own_certificate(client, certificate)
            if _is_first_use(client, parts[1], certificate):
                client = _settle(ctx, client.id, parts[1], certificate)
            return Identity(client.id, client.name, client.federation_id, federation_name, client.token_generation)
    raise _invalid_token()


def _require_own_certificate(client: Client, certificate: str | None) -> None:
    """Raise unless the client presents the certificate it is bound to, if any."""
    if client.certificate not in (None, certificate):
        raise NotAllowed(
            "wrong-certificate",
            "This client's token is bound to a different certificate than the one presented.",
            next_step="Present the certificate it joined with, or ask the operator to rotate the client's token.",
        )


def _is_current(client: Client, secret: str) -> bool:
    return token_format.matches(secret, client.token_hash) or _is_next(client, secret)


def _is_next(client: Client, secret: str) -> bool:
    return client.next_token_hash is not None and token_format.matches(secret, client.next_token_hash)


def _is_first_use(client: Client, secret: str, certificate: str | None) -> bool:
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
