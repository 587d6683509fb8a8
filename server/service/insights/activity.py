"""What happened lately, for the feed and the audit log."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import defer

from server.service.context import Context
from server.service.queries import load_federation
from server.store.tables import AuditEntry, Federation, Participant, Round, Update
from shared.contract.messages import AuditView

_MOST_NAMES = 500
_LOOKED_AT = 5000  # newest audit entries of all federations among which the feed looks for its own


@dataclass(frozen=True)
class AuditFilter:
    """Which entries to list. Empty texts match everything."""

    federation: str = ""
    actor: str = ""
    action: str = ""
    before: int = 0  # entries with a smaller id (0 = from the newest on)


def audit_page(ctx: Context, wanted: AuditFilter, limit: int) -> list[AuditView]:
    """Return matching entries, newest first. An action matches by its start, such as `invite`."""
    query = select(AuditEntry).order_by(AuditEntry.id.desc()).limit(limit)
    if wanted.federation:
        query = query.where(AuditEntry.federation == wanted.federation)
    if wanted.actor:
        query = query.where(AuditEntry.actor == wanted.actor)
    if wanted.action:
        query = query.where(AuditEntry.action.startswith(wanted.action, autoescape=True))
    if wanted.before:
        query = query.where(AuditEntry.id < wanted.before)
    with ctx.db.read() as session:
        return [AuditView.model_validate(row, from_attributes=True) for row in session.execute(query).scalars()]


def federation_names(ctx: Context) -> list[str]:
    """Return the names of the newest federations, sorted: at most _MOST_NAMES."""
    query = select(Federation.name).where(Federation.deleted_at.is_(None)).order_by(Federation.id.desc())
    with ctx.db.read() as session:
        return sorted(session.execute(query.limit(_MOST_NAMES)).scalars())


@dataclass(frozen=True)
class RoundEnd:
    """A round that ended."""

    number: int
    state: str
    reason: str
    at: float
    participants: int
    updates: int


def recent_entries(ctx: Context, name: str, limit: int) -> list[AuditView]:
    """Return the newest audit entries of a federation, newest first."""
    newest = select(func.max(AuditEntry.id)).scalar_subquery()
    query = select(AuditEntry).where(AuditEntry.id > newest - _LOOKED_AT, AuditEntry.federation == name)
    with ctx.db.read() as session:
        found = session.execute(query.order_by(AuditEntry.id.desc()).limit(limit)).scalars()
        return [AuditView.model_validate(row, from_attributes=True) for row in found]


def recent_round_ends(ctx: Context, name: str, limit: int) -> Sequence[RoundEnd]:
    """Return the last rounds that ended, newest first."""
    with ctx.db.read() as session:
        federation = load_federation(session, name)
        query = select(Round).where(Round.federation_id == federation.id, Round.state.in_(("done", "failed")))
        rounds = query.order_by(Round.number.desc()).limit(limit).options(defer(Round.roster))
        ended = session.execute(rounds).scalars().all()
        counts: list[dict[int, int]] = []
        for table in (Participant, Update):
            counted = select(table.round_id, func.count()).where(table.round_id.in_([one.id for one in ended]))
            counts.append({row[0]: row[1] for row in session.execute(counted.group_by(table.round_id))})
    return [
        RoundEnd(
            number=one.number,
            state=one.state,
            reason=one.reason,
            at=one.closed_at or one.opened_at,
            participants=counts[0].get(one.id, 0),
            updates=counts[1].get(one.id, 0),
        )
        for one in ended
    ]
