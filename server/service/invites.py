"""Invites: create, list, revoke, and check the token a site joins with."""

import uuid

from sqlalchemy import select
from sqlalchemy.orm import Session

from server.core.errors import Conflict, NotAllowed, NotAuthenticated, NotFound
from server.core.lifecycle import ENDED
from server.service import token_format
from server.service.audit import record_action
from server.service.context import Actor, Context
from server.service.queries import load_federation
from server.store.database import LOCK
from server.store.tables import Client, Federation, Invite
from shared.contract.messages import InviteAnswer, InviteView

_ASK_OPERATOR = "Ask the operator for a new invite."


def create(ctx: Context, actor: Actor, federation_name: str, expires_in_s: float, note: str = "") -> InviteAnswer:
    """Create a single-use invite; the note reminds the operator whom it is for."""
    now, invite_id = ctx.clock(), uuid.uuid4().hex
    token = token_format.new_token("invite", invite_id)
    with ctx.db.write() as session:
        federation = load_federation(session, federation_name)
        require_not_ended(federation)
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
        record_action(session, ctx, actor, "invite.create", federation_name, invite=invite_id, **detail)
    return InviteAnswer(id=invite_id, token=token.text, federation=federation_name, expires_at=now + expires_in_s)


def require_not_ended(federation: Federation) -> None:
    """Raise Conflict if the federation has finished or was cancelled."""
    if federation.state in ENDED:
        raise Conflict("federation-ended", f"Federation {federation.name!r} is {federation.state}.")


def invites_of(ctx: Context, federation_name: str) -> list[InviteView]:
    """List all invites without their tokens, oldest first. Unused ones are deleted 30 days after they expire."""
    with ctx.db.read() as session:
        federation = load_federation(session, federation_name)
        query = select(Invite, Client.name).outerjoin(Client, Client.id == Invite.used_by)
        rows = session.execute(
            query.where(Invite.federation_id == federation.id).order_by(Invite.created_at, Invite.id)
        ).all()
    return [
        InviteView(
            id=invite.id,
            note=invite.note,
            state=_state(invite, ctx.clock()),
            created_at=invite.created_at,
            expires_at=invite.expires_at,
            used_at=invite.used_at,
            used_by=used_by,
        )
        for invite, used_by in rows
    ]


def _state(invite: Invite, now: float) -> str:
    if invite.used_by is not None:
        return "used"
    if invite.revoked_at is not None:
        return "revoked"
    return "expired" if invite.expires_at <= now else "open"


def revoke(ctx: Context, actor: Actor, federation_name: str, invite_id: str) -> None:
    """Revoke an unused invite. Idempotent; raise Conflict if it has been used."""
    with ctx.db.write() as session:
        federation = load_federation(session, federation_name)
        invite = session.get(Invite, invite_id, with_for_update=LOCK)
        if invite is None or invite.federation_id != federation.id:
            raise NotFound("no-such-invite", f"Federation {federation_name!r} has no invite {invite_id!r}.")
        if invite.used_by is not None:
            name = session.get_one(Client, invite.used_by).name
            raise Conflict(
                "invite-used",
                f"The invite was used by {name!r} and can no longer be revoked.",
                next_step=f"To end that client's access: distrans-server client revoke {federation_name} {name}",
            )
        if invite.revoked_at is None:
            invite.revoked_at = ctx.clock()
            record_action(session, ctx, actor, "invite.revoke", federation_name, invite=invite_id)


def check_holder(ctx: Context, invite_token: str) -> None:
    """Raise unless the token's invite can be used now, or its join repeated."""
    with ctx.db.read() as session:
        check_invite(session, ctx, invite_token)


def check_invite(session: Session, ctx: Context, text: str) -> tuple[Invite, Federation, Client | None]:
    """Return the token's invite, locked, and its federation, if the invite can be used now.

    Also return the client that used it, if that join may still be repeated; see `require_same_attempt`.
    """
    parts = token_format.split_token("invite", text)
    found = session.get(Invite, parts[0], with_for_update=LOCK) if parts else None
    federation = session.get(Federation, found.federation_id) if found is not None else None
    if (
        found is None
        or parts is None
        or not token_format.matches(parts[1], found.token_hash)
        or federation is None
        or federation.deleted_at is not None
    ):
        raise NotAuthenticated("invalid-invite", "The invite is not valid.", next_step=_ASK_OPERATOR)
    if found.used_by is not None:
        client = session.get_one(Client, found.used_by)
        if client.attempt_hash is None or client.state != "active":
            raise _invite_used()
        return found, federation, client
    if found.revoked_at is not None:
        raise NotAllowed("invite-revoked", "The operator has revoked this invite.", next_step=_ASK_OPERATOR)
    if found.expires_at <= ctx.clock():
        raise NotAllowed("invite-expired", "The invite has expired.", next_step=_ASK_OPERATOR)
    return found, federation, None


def require_same_attempt(client: Client | None, attempt: str | None) -> None:
    """Raise unless the invite is unused (no client) or the same site is repeating its join."""
    if client is None:
        return
    if attempt is None or client.attempt_hash is None or not token_format.matches(attempt, client.attempt_hash):
        raise _invite_used()


def _invite_used() -> NotAllowed:
    return NotAllowed(
        "invite-used",
        "The invite has already been used.",
        next_step="If your own join was interrupted, repeat it with the same --state folder; "
        "otherwise ask the operator for a new invite.",
    )
