"""Markers that change when a page would: small queries, so that asking often costs next to nothing."""

from sqlalchemy import func, select

from server.core.lifecycle import UNDER_WAY
from server.service.context import Context
from server.service.queries import load_federation
from server.store.tables import AuditEntry, Client, Evaluation, Federation, Invite, Round, Transfer, Update

_SLICE_S = 30.0  # what depends on the time alone, such as who counts as absent, is at most this old


def federation_marker(ctx: Context, name: str) -> str:
    """Return a marker of everything the page of a federation shows."""
    with ctx.db.read() as session:
        federation = load_federation(session, name)
        under_way = select(Round.id).where(Round.federation_id == federation.id, Round.state.in_(UNDER_WAY))
        newest = select(func.max(Evaluation.model_number)).where(Evaluation.federation_id == federation.id)
        evaluations = select(func.count()).where(
            Evaluation.federation_id == federation.id, Evaluation.model_number >= newest.scalar_subquery() - 1
        )
        clients = select(func.count(), func.max(Client.status_at), func.max(Client.joined_at))
        parts = select(
            select(func.max(Round.id)).where(Round.federation_id == federation.id).scalar_subquery(),
            select(func.count()).where(Update.round_id.in_(under_way)).scalar_subquery(),
            select(func.count()).where(Transfer.round_id.in_(under_way)).scalar_subquery(),
            select(func.count()).where(Invite.federation_id == federation.id).scalar_subquery(),
            select(func.max(AuditEntry.id)).scalar_subquery(),
            newest.scalar_subquery(),
            evaluations.scalar_subquery(),
        )
        found = (
            *session.execute(parts).one(),
            *session.execute(clients.where(Client.federation_id == federation.id)).one(),
        )
        stage = (federation.id, federation.created_at, federation.version, federation.state, federation.due_uptime)
    return repr((*stage, *found, ctx.clock() // _SLICE_S))


def coordinator_marker(ctx: Context) -> str:
    """Return a marker of everything the list of federations shows."""
    with ctx.db.read() as session:
        columns = (Federation.id, Federation.version, Federation.state, Federation.completed_rounds)
        rows = session.execute(select(*columns).where(Federation.deleted_at.is_(None)).order_by(Federation.id)).all()
        counted = (
            session.execute(select(func.max(AuditEntry.id))).scalar(),
            session.execute(
                select(func.count()).where(Update.round_id.in_(select(Round.id).where(Round.state.in_(UNDER_WAY))))
            ).scalar(),
        )
    return repr((rows, counted, ctx.clock() // _SLICE_S))
