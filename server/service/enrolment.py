"""Who may speak: invites, joining, client tokens, and what a client may change about itself."""

import json
import uuid
from dataclasses import dataclass, field, replace

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from server.core.errors import Conflict, InvalidInput, NotAllowed, NotAuthenticated, NotFound, TooMany
from server.core.rounds import ENDED
from server.service import tokens
from server.service.context import Actor, Context, dump_roster, load_roster, plan_of, record
from server.service.federations import load
from server.service.models import forget_measurements
from server.service.progress import advance, round_under_way
from server.service.uptime import uptime
from server.store.session import LOCK
from server.store.tables import AuditEntry, Client, Federation, Invite
from shared.near_match import did_you_mean
from shared.schemas import (
    MAX_IMAGES,
    ClientView,
    FederationPlanAnswer,
    InviteAnswer,
    JoinAnswer,
    JoinRequest,
    TokenAnswer,
)

CHANGES_PER_HOUR = 60


@dataclass(frozen=True)
class Identity:
    """An authenticated client."""

    client_id: str
    name: str
    federation_id: int
    federation: str
    token_generation: int = field(default=0, compare=False, repr=False)


def invite(ctx: Context, actor: Actor, federation_name: str, expires_in_s: float, note: str = "") -> InviteAnswer:
    """A one-use invite; the note tells the operator whom it is for."""
    now, invite_id = ctx.clock(), uuid.uuid4().hex
    token = tokens.new_token("invite", invite_id)
    with ctx.db.write() as session:
        federation = load(session, federation_name)
        if federation.state in ENDED:
            raise Conflict("federation-ended", f"Federation {federation_name!r} is {federation.state}.")
        session.add(
            Invite(
                id=invite_id,
                federation_id=federation.id,
                token_hash=token.hash,
                created_at=now,
                expires_at=now + expires_in_s,
                note=note,
            )
        )
        detail = {"note": note} if note else {}
        record(session, ctx, actor, "invite.create", federation_name, invite=invite_id, **detail)
    return InviteAnswer(id=invite_id, token=token.text, federation=federation_name, expires_at=now + expires_in_s)


def check_invite(session: Session, ctx: Context, text: str) -> tuple[Invite, Federation, Client | None]:
    """The invite of a token that can be used now, with its row locked; its federation.

    Also the client that used it, if the join may still be repeated by whoever knows the attempt: see `_check_attempt`.
    """
    parts = tokens.split_token("invite", text)
    found = session.get(Invite, parts[0], with_for_update=LOCK) if parts else None
    federation = session.get(Federation, found.federation_id) if found is not None else None
    if (
        found is None
        or parts is None
        or not tokens.matches(parts[1], found.token_hash)
        or federation is None
        or federation.deleted_at is not None
    ):
        raise NotAuthenticated(
            "invalid-invite", "The invite is not valid.", next_step="Ask the operator for a new one."
        )
    if found.used_by is not None:
        client = session.get_one(Client, found.used_by)
        if client.attempt_hash is None or client.state != "active":
            raise _invite_used()
        return found, federation, client
    if found.revoked_at is not None:
        raise NotAllowed(
            "invite-revoked", "The operator has revoked the invite.", next_step="Ask the operator for a new one."
        )
    if found.expires_at <= ctx.clock():
        raise NotAllowed("invite-expired", "The invite has expired.", next_step="Ask the operator for a new one.")
    return found, federation, None


def _invite_used() -> NotAllowed:
    return NotAllowed(
        "invite-used",
        "The invite has been used already.",
        next_step="If your own join was interrupted, repeat it with the same --state folder; "
        "otherwise ask the operator for a new invite.",
    )


def _check_attempt(client: Client | None, attempt: str | None) -> None:
    """Let only the site that has used an invite repeat its join."""
    if client is None:
        return
    if attempt is None or client.attempt_hash is None or not tokens.matches(attempt, client.attempt_hash):
        raise _invite_used()


def check_holder(ctx: Context, invite_token: str) -> None:
    """Refuse whoever has no invite that can be used now, or once more by the site that has used it."""
    with ctx.db.read() as session:
        check_invite(session, ctx, invite_token)


def preview(ctx: Context, invite_token: str, attempt: str | None = None) -> FederationPlanAnswer:
    """The plan behind an invite, so that a site can check its data before it enrols; uses nothing up."""
    with ctx.db.read() as session:
        _, federation, client = check_invite(session, ctx, invite_token)
        _check_attempt(client, attempt)
        return FederationPlanAnswer(federation=federation.name, plan=plan_of(federation.plan))


def join(
    ctx: Context, invite_token: str, request: JoinRequest, address: str = "", certificate: str | None = None
) -> JoinAnswer:
    """Enrol a site and use the invite up; a certificate that it has shown is its own from now on.

    The same attempt with the same invite, before the client has ever authenticated, updates the record and answers with
    a new token: the answer to the first one may have been lost.
    """
    try:
        with ctx.db.write() as session:
            found, federation, client = _lock_invite(session, ctx, invite_token)
            _check_attempt(client, request.attempt)
            if federation.state in ENDED:
                raise Conflict("federation-ended", f"Federation {federation.name!r} is {federation.state}.")
            counts, repeated = _ordered_counts(federation, request.class_counts), client is not None
            heard_uptime = uptime(session)
            if client is None:
                client = _new_client(ctx, federation, request.attempt)
                session.add(client)
            elif client.name != request.name:
                _rename_in_open_round(session, federation, client.name, request.name)
            token = tokens.new_token("client", client.id)
            client.name, client.token_hash, client.certificate = request.name, token.hash, certificate
            client.class_counts, client.held_out_images = counts, request.held_out_images
            client.agent_version, client.device = request.agent_version, request.device
            client.last_seen_at, client.heard_uptime = ctx.clock(), heard_uptime
            session.flush()
            found.used_at, found.used_by = found.used_at or ctx.clock(), client.id
            detail = {"id": client.id} | ({"repeated": True} if repeated else {})
            record(session, ctx, Actor(f"client:{request.name}", address), "client.join", federation.name, **detail)
            advance(session, ctx, federation)
            return JoinAnswer(
                client_id=client.id, token=token.text, federation=federation.name, plan=plan_of(federation.plan)
            )
    except IntegrityError as error:
        raise Conflict(
            "client-name-taken",
            f"An active client is called {request.name!r} already.",
            next_step="Choose another --name, or have the operator revoke the old one.",
        ) from error


def _lock_invite(session: Session, ctx: Context, text: str) -> tuple[Invite, Federation, Client | None]:
    """What `check_invite` returns, checked again once all rows are locked; the federation before its client.

    The federation may have been deleted, or the client revoked, while this waited for them.
    """
    _, federation, client = check_invite(session, ctx, text)
    for row in filter(None, (federation, client)):
        session.refresh(row, with_for_update=LOCK)
    return check_invite(session, ctx, text)


def _new_client(ctx: Context, federation: Federation, attempt: str | None) -> Client:
    """A client without what its site says of itself."""
    return Client(
        id=uuid.uuid4().hex,
        federation_id=federation.id,
        attempt_hash=None if attempt is None else tokens.hash_secret(attempt),
        state="active",
        joined_at=ctx.clock(),
    )


def _rename_in_open_round(session: Session, federation: Federation, old: str, new: str) -> None:
    """A round that opened between two attempts of one join knows the client by its name; it has uploaded nothing."""
    round_ = round_under_way(session, federation)
    if round_ is not None:
        roster = [replace(row, id=new) if row.id == old else row for row in load_roster(round_.roster)]
        round_.roster = dump_roster(roster)


def _ordered_counts(federation: Federation, counts: dict[str, int]) -> str:
    classes = plan_of(federation.plan).classes
    unknown = sorted(set(counts) - set(classes))
    if unknown:
        raise InvalidInput(
            "unknown-class",
            f"The plan has no class {', '.join(map(repr, unknown[:5]))}.",
            next_step=f"Its classes are {', '.join(classes[:20])}{' …' if len(classes) > 20 else ''}.",
        )
    ordered = [counts.get(name, 0) for name in classes]
    if not sum(ordered):
        raise InvalidInput("no-data", "A client needs at least one training image.")
    if sum(ordered) > MAX_IMAGES:
        raise InvalidInput("too-much-data", f"{sum(ordered)} training images are more than the {MAX_IMAGES} allowed.")
    return json.dumps(ordered, separators=(",", ":"))


def authenticate(ctx: Context, text: str, certificate: str | None = None) -> Identity:
    """The client behind a token; a revoked one is told so, and so is one that shows another's certificate."""
    parts = tokens.split_token("client", text)
    if parts is not None:
        with ctx.db.read() as session:
            query = select(Client, Federation.name).join(Federation).where(Federation.deleted_at.is_(None))
            row = session.execute(query.where(Client.id == parts[0])).first()
        if row is None:
            raise _invalid_token("The token is not valid: its client is unknown or its federation was deleted.")
        client, federation_name = row
        if _is_current(client, parts[1]):
            _refuse_ended(client)
            _refuse_foreign(client, certificate)
            if _is_first_use(client, parts[1], certificate):
                client = _settle(ctx, client.id, parts[1], certificate)
            return Identity(client.id, client.name, client.federation_id, federation_name, client.token_generation)
    raise _invalid_token()


def _refuse_foreign(client: Client, certificate: str | None) -> None:
    """A client that has shown a certificate has to show the same one again."""
    if client.certificate not in (None, certificate):
        raise NotAllowed(
            "wrong-certificate",
            "This client's token belongs to another certificate than the one that was shown.",
            next_step="Show the one that it joined with, or have the operator rotate the client's token.",
        )


def _is_current(client: Client, secret: str) -> bool:
    return tokens.matches(secret, client.token_hash) or _is_next(client, secret)


def _is_next(client: Client, secret: str) -> bool:
    return client.next_token_hash is not None and tokens.matches(secret, client.next_token_hash)


def _is_first_use(client: Client, secret: str, certificate: str | None) -> bool:
    """Whether something has to be written down: once per token and certificate, not with every request."""
    is_new_certificate = client.certificate is None and certificate is not None
    return client.attempt_hash is not None or is_new_certificate or _is_next(client, secret)


def _settle(ctx: Context, client_id: str, secret: str, certificate: str | None) -> Client:
    """The first use of a token: its join can no longer be repeated, and the token that it replaces ends.

    A client without a certificate, or whose token was rotated, is bound to the first one that it shows.
    """
    with ctx.db.write() as session:
        client = session.get(Client, client_id, with_for_update=LOCK)
        if client is None or not _is_current(client, secret):  # another request, or the operator, was first
            raise _invalid_token()
        _refuse_foreign(client, certificate)
        federation = session.get_one(Federation, client.federation_id)
        actor = Actor(f"client:{client.name}")
        client.attempt_hash = None
        if client.certificate is None and certificate is not None:
            client.certificate = certificate
            record(session, ctx, actor, "client.bind", federation.name, certificate=certificate)
        if _is_next(client, secret):
            client.token_hash, client.next_token_hash = str(client.next_token_hash), None
            record(session, ctx, actor, "client.renewed", federation.name)
        return client


def refuse_outdated(session: Session, identity: Identity) -> Client:
    """The client of a request that takes long: it may have left or been revoked, or its token rotated, since it began.

    A token that the client itself has renewed ends no request that began with it: it is still the same client.
    """
    query = select(Client).join(Federation).where(Federation.deleted_at.is_(None), Client.id == identity.client_id)
    client = session.execute(query).scalar_one_or_none()
    if client is None:
        raise _invalid_token("The token is not valid: its federation was deleted.")
    _refuse_ended(client)
    if client.token_generation != identity.token_generation:
        raise _invalid_token()
    return client


def _invalid_token(message: str = "The token is not valid.") -> NotAuthenticated:
    return NotAuthenticated("invalid-token", message, next_step="Join with an invite to get one.")


def _refuse_ended(client: Client) -> None:
    """A client that has left or was revoked may do nothing more, and is told so."""
    if client.state != "active":
        raise NotAllowed(
            f"client-{client.state}",
            "This client was revoked by the operator." if client.state == "revoked" else "This client has left.",
            next_step="Join again with a new invite.",
        )


def client_view(session: Session, client: Client) -> ClientView:
    """A client with its class counts by name."""
    federation = session.get_one(Federation, client.federation_id)
    counts = dict(zip(plan_of(federation.plan).classes, json.loads(client.class_counts), strict=True))
    return ClientView(
        id=client.id,
        name=client.name,
        state=client.state,
        federation=federation.name,
        class_counts=counts,
        held_out_images=client.held_out_images,
        agent_version=client.agent_version,
        device=client.device,
        joined_at=client.joined_at,
        last_seen_at=client.last_seen_at,
        activity=client.activity,
        activity_detail=client.activity_detail,
        troubles=json.loads(client.troubles),
        status_at=client.status_at,
    )


def me(ctx: Context, identity: Identity) -> ClientView:
    """The client's own record."""
    with ctx.db.read() as session:
        return client_view(session, session.get_one(Client, identity.client_id))


def update_counts(
    ctx: Context, identity: Identity, actor: Actor, counts: dict[str, int], held_out_images: int | None = None
) -> ClientView:
    """New class counts, which take effect when the next round opens, and held-out images, if they are given.

    Counts that are the same change nothing.
    """
    with ctx.db.read() as session:
        client = session.get_one(Client, identity.client_id)
        federation = session.get_one(Federation, client.federation_id)
        ordered = _ordered_counts(federation, counts)
        held_out = client.held_out_images if held_out_images is None else held_out_images
        if (client.class_counts, client.held_out_images) == (ordered, held_out):
            return client_view(session, client)
    with ctx.db.write() as session:
        client = session.get_one(Client, identity.client_id, with_for_update=LOCK)
        _refuse_frequent_changes(session, ctx, actor, federation.name)
        client.class_counts, client.held_out_images = ordered, held_out
        record(session, ctx, actor, "client.update", federation.name)
        return client_view(session, client)


def _refuse_frequent_changes(session: Session, ctx: Context, actor: Actor, federation_name: str) -> None:
    """Each change is kept in the audit log for good, so a client may not add to it without bound."""
    recent = select(func.count()).where(
        AuditEntry.at > ctx.clock() - 3600,
        AuditEntry.action.in_(["client.update", "client.renew"]),
        AuditEntry.actor == actor.name,
        AuditEntry.federation == federation_name,
    )
    if session.execute(recent).scalar_one() >= CHANGES_PER_HOUR:
        raise TooMany(
            "too-many-changes",
            f"A client may change its record {CHANGES_PER_HOUR} times per hour.",
            retry_after_s=600,
        )


def clients_of(ctx: Context, federation_name: str, only_client: str | None = None) -> list[ClientView]:
    """The clients of a federation, or the one that asks."""
    with ctx.db.read() as session:
        federation = load(session, federation_name)
        query = select(Client).where(Client.federation_id == federation.id).order_by(Client.name, Client.joined_at)
        if only_client is not None:
            query = query.where(Client.id == only_client)
        return [client_view(session, client) for client in session.execute(query).scalars()]


def leave(ctx: Context, identity: Identity, actor: Actor) -> None:
    """The client goes; what it has uploaded still counts, what it has not is no longer waited for."""
    _end(ctx, actor, identity.client_id, "left", "client.leave")


def revoke(ctx: Context, actor: Actor, federation_name: str, client: str) -> None:
    """End a client's access, by its name or id; does nothing when that has happened already."""
    _end(ctx, actor, _find(ctx, federation_name, client), "revoked", "client.revoke")


def rotate(ctx: Context, actor: Actor, federation_name: str, client: str) -> TokenAnswer:
    """A new token for a client; the old one is worthless at once."""
    client_id = _find(ctx, federation_name, client)
    token = tokens.new_token("client", client_id)
    with ctx.db.write() as session:
        federation = load(session, federation_name, lock=True)  # first, as everywhere
        row = session.get_one(Client, client_id, with_for_update=LOCK)
        if row.state != "active":
            raise Conflict("client-not-active", f"Client {row.name!r} is {row.state}.")
        row.token_hash, row.certificate = token.hash, None  # the next certificate that comes with it is its own
        row.next_token_hash = row.attempt_hash = None  # a renewal or a join under way ends too
        row.token_generation += 1
        ctx.touch(federation)  # its long poll, begun with the old token, ends
        record(session, ctx, actor, "client.rotate", federation_name, client=row.name)
    return TokenAnswer(client_id=client_id, token=token.text)


def renew(ctx: Context, identity: Identity, actor: Actor) -> TokenAnswer:
    """A new token for the client that asks; its present one stays valid until the new one is first used.

    So an answer that is lost locks nobody out. Asking again replaces the token that was not yet used.
    """
    token = tokens.new_token("client", identity.client_id)
    with ctx.db.write() as session:
        session.get(Client, identity.client_id, with_for_update=LOCK)  # the operator may be rotating the token
        client = refuse_outdated(session, identity)
        _refuse_frequent_changes(session, ctx, actor, identity.federation)
        client.next_token_hash = token.hash
        record(session, ctx, actor, "client.renew", identity.federation)
    return TokenAnswer(client_id=identity.client_id, token=token.text)


def _find(ctx: Context, federation_name: str, client: str) -> str:
    with ctx.db.read() as session:
        federation = load(session, federation_name)
        query = select(Client).where(Client.federation_id == federation.id)
        rows = session.execute(query.where((Client.id == client) | (Client.name == client))).scalars().all()
        names = [] if rows else [row.name for row in session.execute(query).scalars()]
    if not rows:
        near = did_you_mean(client, names) or "."
        raise NotFound("no-such-client", f"Federation {federation_name!r} has no client {client!r}{near}")
    return min(rows, key=lambda row: (row.state != "active", -row.joined_at)).id


def _end(ctx: Context, actor: Actor, client_id: str, state: str, action: str) -> None:
    with ctx.db.write() as session:
        federation_id = session.get_one(Client, client_id).federation_id
        federation = session.get_one(Federation, federation_id, with_for_update=LOCK)  # first, as everywhere
        client = session.get_one(Client, client_id, with_for_update=LOCK, populate_existing=True)
        if client.state != "active":
            return
        client.state = state
        if state == "revoked" or federation.state not in ENDED:  # sites may leave once it is over
            forget_measurements(session, federation, client)
        ctx.touch(federation)  # its long poll ends
        record(session, ctx, actor, action, federation.name, client=client.name)
        advance(session, ctx, federation)
