"""Removes what nobody will ask for again. No wall clock decides what that is, so a jump deletes nothing."""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sqlalchemy import case, delete, exists, func, or_, select, update
from sqlalchemy.sql.dml import UpdateBase

from server.service import deletion
from server.service.context import Context
from server.service.models import drop_old_models
from server.service.uptime import uptime
from server.store import blobs
from server.store.tables import Blob, Invite, Model, Personal, Round, Transfer, Update

_BATCH = 200  # blobs looked up at a time
_PAUSE_S = 0.002  # between two transactions: a writer that waits gets its turn
_Garbage = list[tuple[str, UpdateBase]]  # a blob, and the statement that removes the last reference to it


@dataclass(frozen=True)
class Retention:
    """How long things are kept that are no longer needed."""

    keep_round_uploads: int = 1  # the newest finished rounds of each federation whose uploads stay
    resumable_s: float = 24 * 3600.0  # a resumable upload after it was interrupted
    torn_s: float = 600.0  # a torn PUT whose process died
    garbage_s: float = 3600.0  # a blob that nothing refers to
    keep_models: int = 0  # the newest models of each federation that stay, besides the first and the best; 0: all


@dataclass
class Unreferenced:
    """Keys that nothing refers to, with the time this process first saw them so.

    Something just written is unreferenced too, so a key counts as garbage only after `garbage_s`. The process' own
    clock decides: by a wall clock that was set ahead, everything would be old.
    """

    ctx: Context
    retention: Retention
    since: dict[str, float] = field(default_factory=dict)

    def garbage(self, found: Iterable[str]) -> list[str]:
        """Note what is unreferenced now; return the keys that have been for `garbage_s`."""
        now = self.ctx.monotonic()
        self.since = {key: self.since.get(key, now) for key in found}
        return sorted(key for key, since in self.since.items() if now - since >= self.retention.garbage_s)


class Cleaner:
    """Cleans the database and the object store on behalf of one process."""

    def __init__(self, ctx: Context, retention: Retention, stop: threading.Event | None = None) -> None:
        self._ctx, self._retention, self._stop = ctx, retention, stop or threading.Event()
        self._blobs, self._objects = Unreferenced(ctx, retention), Unreferenced(ctx, retention)

    def clean(self) -> int:
        """Remove everything that nobody will ask for again; the number of blobs removed.

        Each blob goes in short transactions of its own, and is looked up outside of them, so no lock is held while
        tables are searched. Returns early when the process stops; the next call resumes.
        """
        ctx, removed = self._ctx, 0
        for find in (_expired_transfers, _old_updates, _old_personals):
            tried: set[str] = set()
            while found := [row for row in find(ctx, self._retention) if row[0] not in tried]:
                for blob_id, unlink in found:
                    if self._stop.wait(_PAUSE_S):
                        return removed
                    tried.add(blob_id)
                    removed += _let_go(ctx, blob_id, unlink)
        deletion.finish(ctx, self._stop)
        for federation_id in _with_old_models(ctx, self._retention):
            while not self._stop.wait(_PAUSE_S) and (
                dropped := drop_old_models(ctx, federation_id, self._retention.keep_models)
            ):
                removed += dropped
        for blob_id in self._blobs.garbage(_orphans(ctx)):
            if self._stop.wait(_PAUSE_S):
                return removed
            blobs.remove(ctx.db, blob_id)
            removed += 1
        with ctx.db.write() as session:
            unused = delete(Invite).where(Invite.used_at.is_(None), Invite.expires_at < ctx.clock() - 30 * 86400)
            session.execute(unused)
        ctx.db.checkpoint()
        return removed

    def collect_objects(self) -> int:
        """Remove objects that a crash left without a row that refers to them; how many. Lists all objects."""
        garbage = self._objects.garbage(blobs.unreferenced_objects(self._ctx.db))
        blobs.delete_objects(self._ctx.db, garbage)
        return len(garbage)


def _let_go(ctx: Context, blob_id: str, unlink: UpdateBase) -> bool:
    """Remove a blob with its last reference, unless that has changed since it was looked up."""
    with ctx.db.write() as session:
        if not session.execute(unlink).rowcount:  # type: ignore[attr-defined]  # an UPDATE's or a DELETE's has it
            return False
        blobs.drop(session, blob_id)
    return True


def _expired_transfers(ctx: Context, retention: Retention) -> _Garbage:
    """Uploads that were torn, or whose round has ended."""
    patience_s = case((Transfer.resumable, retention.resumable_s), else_=retention.torn_s)
    with ctx.db.read() as session:
        expired = (
            select(Transfer)
            .join(Round, Round.id == Transfer.round_id)
            .where(or_(Round.state != "open", Transfer.touched_uptime < uptime(session) - patience_s))
        )
        rows = session.execute(expired.limit(_BATCH)).scalars().all()
    return [
        # Not one that has grown meanwhile.
        (row.blob_id, delete(Transfer).where(Transfer.id == row.id, Transfer.touched_uptime == row.touched_uptime))
        for row in rows
    ]


def _old_updates(ctx: Context, retention: Retention) -> _Garbage:
    """The newest finished rounds with uploads keep them; failed rounds count as well."""
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
    """Personal tensors go with models that have been followed by newer ones."""
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
    """Federations that may have more models than are to be kept."""
    if not retention.keep_models:
        return []
    has_more = func.count() > retention.keep_models
    query = select(Model.federation_id).where(Model.blob_id.is_not(None)).group_by(Model.federation_id).having(has_more)
    with ctx.db.read() as session:
        return session.execute(query).scalars().all()


def _orphans(ctx: Context) -> Sequence[str]:
    """Blobs that nothing refers to: a crash left them, or they are still being written."""
    with ctx.db.read() as session:
        return session.execute(select(Blob.id).where(blobs.is_unreferenced())).scalars().all()
