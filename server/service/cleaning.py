"""Removes data that is no longer needed. Only the expiry of invites depends on the wall clock."""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sqlalchemy import case, delete, exists, func, or_, select, update
from sqlalchemy.sql.dml import UpdateBase

from server.service import deletion
from server.service.context import Context
from server.service.retention import Retention, drop_old_models
from server.service.uptime import uptime
from server.store import blobs
from server.store.database import BULK_PAUSE_S
from server.store.tables import Blob, Invite, Model, Personal, Round, Transfer, Update

_BATCH = 200  # blobs per lookup
_FORGET_INVITES_S = 30 * 86400.0  # after they expired unused
_Garbage = list[tuple[str, UpdateBase]]  # a blob id, and the statement that removes its last reference


@dataclass
class Unreferenced:
    """Unreferenced keys, with the time this process first saw them unreferenced.

    New data is unreferenced too at first, so a key counts as garbage only after `garbage_s` on the process's own clock:
    by a wall clock that was set ahead, everything would look old.
    """

    ctx: Context
    retention: Retention
    since: dict[str, float] = field(default_factory=dict)

    def garbage(self, found: Iterable[str]) -> list[str]:
        """Note the currently unreferenced keys; return those unreferenced for `garbage_s`."""
        now = self.ctx.monotonic()
        self.since = {key: self.since.get(key, now) for key in found}
        return sorted(key for key, since in self.since.items() if now - since >= self.retention.garbage_s)


class Cleaner:
    """Cleans the database and the object store on behalf of one process."""

    def __init__(self, ctx: Context, retention: Retention, stop: threading.Event | None = None) -> None:
        self._ctx, self._retention, self._stop = ctx, retention, stop or threading.Event()
        self._blobs, self._objects = Unreferenced(ctx, retention), Unreferenced(ctx, retention)

    def clean(self) -> int:
        """Remove everything no longer needed; return the number of blobs removed.

        Each blob is removed in its own short transactions and looked up outside them, so that no lock is held during
        searches. Return early when the process stops; the next call continues.
        """
        ctx, removed = self._ctx, 0
        for find in (_expired_transfers, _old_updates, _old_personals):
            tried: set[str] = set()
            while found := [row for row in find(ctx, self._retention) if row[0] not in tried]:
                for blob_id, unlink in found:
                    if self._stop.wait(BULK_PAUSE_S):
                        return removed
                    tried.add(blob_id)
                    removed += _remove_with_reference(ctx, blob_id, unlink)
        deletion.finish(ctx, self._stop)
        for federation_id in _with_old_models(ctx, self._retention):
            while not self._stop.wait(BULK_PAUSE_S) and (
                dropped := drop_old_models(ctx, federation_id, self._retention.keep_models)
            ):
                removed += dropped
        for blob_id in self._blobs.garbage(_orphans(ctx)):
            if self._stop.wait(BULK_PAUSE_S):
                return removed
            blobs.remove(ctx.db, blob_id)
            removed += 1
        with ctx.db.write() as session:
            expired_before = ctx.clock() - _FORGET_INVITES_S
            session.execute(delete(Invite).where(Invite.used_at.is_(None), Invite.expires_at < expired_before))
        ctx.db.checkpoint()
        return removed

    def collect_objects(self) -> int:
        """Delete objects that a crash left unreferenced; return how many. Lists all objects."""
        garbage = self._objects.garbage(blobs.unreferenced_objects(self._ctx.db))
        blobs.delete_objects(self._ctx.db, garbage)
        return len(garbage)


def _remove_with_reference(ctx: Context, blob_id: str, unlink: UpdateBase) -> bool:
    """Remove a blob with its last reference; return False if the reference has changed since the lookup."""
    with ctx.db.write() as session:
        if not session.execute(unlink).rowcount:  # type: ignore[attr-defined]  # an UPDATE's or DELETE's result has it
            return False
        blobs.remove_in(session, blob_id)
    return True


def _expired_transfers(ctx: Context, retention: Retention) -> _Garbage:
    """Find uploads that were interrupted, or whose round has closed."""
    patience_s = case((Transfer.resumable, retention.resumable_s), else_=retention.torn_s)
    with ctx.db.read() as session:
        expired = (
            select(Transfer)
            .join(Round, Round.id == Transfer.round_id)
            .where(or_(Round.state != "open", Transfer.touched_uptime < uptime(session) - patience_s))
        )
        rows = session.execute(expired.limit(_BATCH)).scalars().all()
    return [
        # Not if it has grown in the meantime.
        (row.blob_id, delete(Transfer).where(Transfer.id == row.id, Transfer.touched_uptime == row.touched_uptime))
        for row in rows
    ]


def _old_updates(ctx: Context, retention: Retention) -> _Garbage:
    """Find uploads of all but the newest finished rounds that have any; failed rounds count as finished."""
    finished = Round.state.in_(["done", "failed"])
    newest = (
        select(Round.federation_id, func.max(Round.number).label("number"))
        .where(finished, exists().where(Update.round_id == Round.id))
        .group_by(Round.federation_id)
        .subquery()
    )
    old = (
        select(Update.blob_id)
        .join(Round, Round.id == Update.round_id)
        .join(newest, newest.c.federation_id == Round.federation_id)
        .where(
            Update.blob_id.is_not(None),
            finished,
            Round.number <= newest.c.number - retention.keep_round_uploads,
        )
    )
    with ctx.db.read() as session:
        ids = [str(blob_id) for blob_id in session.execute(old.limit(_BATCH)).scalars()]
    return [(blob_id, update(Update).where(Update.blob_id == blob_id).values(blob_id=None)) for blob_id in ids]


def _old_personals(ctx: Context, _retention: Retention) -> _Garbage:
    """Find personal tensors of all but the newest two models."""
    newest = (
        select(Model.federation_id, func.max(Model.number).label("number")).group_by(Model.federation_id).subquery()
    )
    old = (
        select(Personal.blob_id)
        .join(newest, newest.c.federation_id == Personal.federation_id)
        .where(Personal.model_number < newest.c.number - 1)
    )
    with ctx.db.read() as session:
        ids = session.execute(old.limit(_BATCH)).scalars().all()
    return [(blob_id, delete(Personal).where(Personal.blob_id == blob_id)) for blob_id in ids]


def _with_old_models(ctx: Context, retention: Retention) -> Sequence[int]:
    """Return the federations that may have more models than should be kept."""
    if not retention.keep_models:
        return []
    has_more = func.count() > retention.keep_models
    query = select(Model.federation_id).where(Model.blob_id.is_not(None)).group_by(Model.federation_id).having(has_more)
    with ctx.db.read() as session:
        return session.execute(query).scalars().all()


def _orphans(ctx: Context) -> Sequence[str]:
    """Return unreferenced blobs: left by a crash, or still being written."""
    with ctx.db.read() as session:
        return session.execute(select(Blob.id).where(blobs.is_unreferenced())).scalars().all()
