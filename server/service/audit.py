"""The audit log: who did what, when, from where."""

import json
from collections.abc import Iterator

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from server.core.errors import TooMany
from server.service.context import Actor, Context
from server.store.database import add_last
from server.store.tables import AuditEntry
from shared.contract.messages import AuditView

CHANGES_PER_HOUR = 60


def record_action(
    session: Session, ctx: Context, actor: Actor, action: str, federation: str = "", **detail: object
) -> None:
    """Add an audit entry in the caller's transaction; ids grow in commit order."""
    add_last(
        session,
        AuditEntry(
            at=ctx.clock(),
            actor=actor.name,
            action=action,
            federation=federation,
            address=actor.address,
            detail=json.dumps(detail, sort_keys=True) if detail else "",
        ),
    )


def entries(ctx: Context, *, federation: str | None = None, after_id: int = 0, limit: int = 100) -> list[AuditView]:
    """Return the oldest entries after an id, so that a reader can page forward to the newest."""
    query = select(AuditEntry).where(AuditEntry.id > after_id).order_by(AuditEntry.id).limit(limit)
    if federation is not None:
        query = query.where(AuditEntry.federation == federation)
    with ctx.db.read() as session:
        return [AuditView.model_validate(row, from_attributes=True) for row in session.execute(query).scalars()]


def all_entries(ctx: Context, federation: str | None = None) -> Iterator[AuditView]:
    """Yield every entry, holding one page in memory at a time."""
    last = 0
    while page := entries(ctx, federation=federation, after_id=last, limit=1000):
        yield from page
        last = page[-1].id


def limit_changes(session: Session, ctx: Context, actor: Actor, federation_name: str) -> None:
    """Raise TooMany if this client changes its record too often: each change stays in the audit log forever."""
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
