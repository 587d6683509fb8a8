"""Reading the audit log."""

from collections.abc import Iterator

from sqlalchemy import select

from server.service.context import Context
from server.store.tables import AuditEntry
from shared.schemas import AuditView


def entries(ctx: Context, *, federation: str | None = None, after_id: int = 0, limit: int = 100) -> list[AuditView]:
    """The oldest entries after one, so that a reader can page through to the newest."""
    query = select(AuditEntry).where(AuditEntry.id > after_id).order_by(AuditEntry.id).limit(limit)
    if federation is not None:
        query = query.where(AuditEntry.federation == federation)
    with ctx.db.read() as session:
        return [AuditView.model_validate(row, from_attributes=True) for row in session.execute(query).scalars()]


def all_entries(ctx: Context, federation: str | None = None) -> Iterator[AuditView]:
    """Every entry, a page in memory at a time."""
    last = 0
    while page := entries(ctx, federation=federation, after_id=last, limit=1000):
        yield from page
        last = page[-1].id
