"""The invites of a federation, as its operator sees them; `server.service.enrolment` makes and uses them."""

from sqlalchemy import select

from server.core.errors import Conflict, NotFound
from server.service.context import Actor, Context, record
from server.service.federations import load
from server.store.session import LOCK
from server.store.tables import Client, Invite
from shared.schemas import InviteView


def invites_of(ctx: Context, federation_name: str) -> list[InviteView]:
    """All invites, oldest first, without their tokens. Unused ones are forgotten 30 days after they expire."""
    with ctx.db.read() as session:
        federation = load(session, federation_name)
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
    """Revoke an unused invite. Idempotent; Conflict for one that was used."""
    with ctx.db.write() as session:
        federation = load(session, federation_name)
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
            record(session, ctx, actor, "invite.revoke", federation_name, invite=invite_id)
