"""Finds federations for which time has run out and advances them; `server.core.lifecycle` decides what follows."""

from sqlalchemy import exists, or_, select

from server.service.context import Context
from server.service.isolation import FailureIsolation
from server.service.transitions import advance, waiting_for
from server.service.uptime import uptime
from server.store.tables import Federation, Round


def enforce_deadlines(ctx: Context, isolation: FailureIsolation | None = None) -> None:
    """Advance every running federation whose deadline has passed. Time stands still for paused ones."""
    isolation = isolation or FailureIsolation(ctx)
    aggregating = exists().where(Round.federation_id == Federation.id, Round.state == "aggregating")
    with ctx.db.read() as session:
        now = uptime(session)
        untimed = Federation.due_uptime.is_(None) & ~aggregating  # written by an older release
        due = select(Federation.id).where(
            Federation.state == "running", or_(untimed, Federation.due_uptime <= now, Federation.look_uptime <= now)
        )
        federation_ids = list(session.execute(due.order_by(Federation.id)).scalars())
    for federation_id in federation_ids:
        with isolation.of(federation_id):
            advance_if_due(ctx, federation_id)


def advance_if_due(ctx: Context, federation_id: int) -> None:
    """Advance a federation unless it is still waiting for something."""
    with ctx.db.read() as session:
        federation = session.get_one(Federation, federation_id)
        is_checked = federation.look_uptime is None or federation.look_uptime > uptime(session)
        if federation.due_uptime is not None and is_checked and waiting_for(session, ctx, federation) is not None:
            return  # e.g. for an upload in progress: a write transaction would only get in its way
    with ctx.db.write() as session:
        advance(session, ctx, session.get_one(Federation, federation_id))
