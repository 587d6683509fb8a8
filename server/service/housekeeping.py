"""What has to happen without anybody asking: deadlines, expiry of torn uploads, retention, garbage, heartbeats."""

import logging
import threading
from dataclasses import dataclass, field

from sqlalchemy import case, delete, exists, func, or_, select, update
from sqlalchemy.sql.dml import UpdateBase

from server.service.context import Context
from server.service.isolation import Isolation
from server.service.progress import advance, note_seen, waiting_for
from server.service.uptime import uptime
from server.store import blobs
from server.store.tables import Blob, Client, Federation, Invite, Model, Participant, Personal, Round, Transfer, Update

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """How long things are kept that are no longer needed."""

    keep_round_uploads: int = 1  # the newest finished rounds of each federation whose uploads stay
    resumable_s: float = 24 * 3600.0  # a resumable upload after it was interrupted
    torn_s: float = 600.0  # a torn PUT whose process died
    garbage_s: float = 3600.0  # a blob that nothing refers to


@dataclass
class Heartbeats:
    """When clients were last heard of and which rounds they were handed; written to the database together."""

    seen: dict[str, float] = field(default_factory=dict)
    handed: dict[int, set[str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, client_id: str, now: float, round_id: int | None = None) -> None:
        """A client has spoken, and may have been handed its part in a round."""
        with self._lock:
            self.seen[client_id] = now
            if round_id is not None:
                self.handed.setdefault(round_id, set()).add(client_id)

    def flush(self, ctx: Context, isolation: Isolation | None = None) -> None:
        """Write down what was noted; what the database does not take now is kept for the next time."""
        isolation = isolation or Isolation(ctx)
        with self._lock:
            seen, self.seen = self.seen, {}
            handed, self.handed = self.handed, {}
        try:
            if seen:
                _write_last_seen(ctx, seen)
                seen = {}
            for round_id in sorted(handed):
                _write_handed(ctx, isolation, round_id, handed[round_id])
                del handed[round_id]
        finally:
            with self._lock:
                self.seen = seen | self.seen
                for round_id, client_ids in handed.items():
                    self.handed.setdefault(round_id, set()).update(client_ids)


def _write_last_seen(ctx: Context, seen: dict[str, float]) -> None:
    with ctx.db.write() as session:
        for client_id, at in sorted(seen.items()):
            # Another process may have written a later moment; one far ahead comes from a clock that was wrong.
            outdated = (Client.last_seen_at < at) | (Client.last_seen_at > at + 60)
            session.execute(update(Client).where(Client.id == client_id, outdated).values(last_seen_at=at))


def _write_handed(ctx: Context, isolation: Isolation, round_id: int, client_ids: set[str]) -> None:
    unseen = select(Participant.client_id).where(Participant.round_id == round_id, Participant.seen.is_(False))
    with ctx.db.read() as session:
        new = client_ids.intersection(session.execute(unseen).scalars())
        federation_id = session.execute(select(Round.federation_id).where(Round.id == round_id)).scalar()
    if new and federation_id is not None:
        with isolation.of(federation_id), ctx.db.write() as session:
            note_seen(session, ctx, round_id, new)


def pass_deadlines(ctx: Context, isolation: Isolation | None = None) -> None:
    """Move every running federation on whose time is over; for a paused one time stands still."""
    isolation = isolation or Isolation(ctx)
    aggregating = exists().where(Round.federation_id == Federation.id, Round.state == "aggregating")
    with ctx.db.read() as session:
        untimed = Federation.due_uptime.is_(None) & ~aggregating  # of an older release
        due = select(Federation.id).where(
            Federation.state == "running", untimed | (Federation.due_uptime <= uptime(session))
        )
        federation_ids = list(session.execute(due.order_by(Federation.id)).scalars())
    for federation_id in federation_ids:
        with isolation.of(federation_id):
            _pass_deadline(ctx, federation_id)


def _pass_deadline(ctx: Context, federation_id: int) -> None:
    with ctx.db.read() as session:
        federation = session.get_one(Federation, federation_id)
        if federation.due_uptime is not None and waiting_for(session, ctx, federation) is not None:
            return  # for an upload that still grows: a write transaction would only be in its way
    with ctx.db.write() as session:
        advance(session, ctx, session.get_one(Federation, federation_id))


_BATCH = 200  # blobs looked up at a time
_PAUSE_S = 0.002  # between two transactions: a writer that waits gets its turn
_NEVER = threading.Event()
_Garbage = list[tuple[str, UpdateBase | None]]  # a blob, and the statement that removes the last reference to it


def clean(ctx: Context, retention: Retention, stop: threading.Event = _NEVER) -> int:
    """Remove everything that nobody will ask for again; the number of blobs removed.

    Each blob goes in short transactions of its own, and is looked up outside of them, so no lock is held while tables
    are searched. Ends early once `stop` is set; the next call goes on.
    """
    removed = 0
    for find in (_expired_transfers, _old_updates, _old_personals, _orphans):
        tried: set[str] = set()
        while found := [(blob_id, unlink) for blob_id, unlink in find(ctx, retention) if blob_id not in tried]:
            for blob_id, unlink in found:
                if stop.wait(_PAUSE_S):
                    return removed
                tried.add(blob_id)
                removed += _let_go(ctx, blob_id, unlink)
    with ctx.db.write() as session:
        session.execute(delete(Invite).where(Invite.used_at.is_(None), Invite.expires_at < ctx.clock() - 30 * 86400))
    ctx.db.checkpoint()
    return removed


def _let_go(ctx: Context, blob_id: str, unlink: UpdateBase | None) -> bool:
    """Remove a blob with its last reference, unless that has changed since it was looked up."""
    if unlink is None:
        blobs.remove(ctx.db, blob_id)
        return True
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
    """The newest finished rounds of each federation keep their uploads; failed rounds count as well."""
    finished = Round.state.in_(["done", "failed"])
    newest = (
        select(Round.federation_id, func.max(Round.number).label("number"))
        .where(finished)
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


def _orphans(ctx: Context, retention: Retention) -> _Garbage:
    """Blobs that a crash left without anything that refers to them."""
    old = select(Blob.id).where(Blob.created_at < ctx.clock() - retention.garbage_s, blobs.is_unreferenced())
    with ctx.db.read() as session:
        return [(blob_id, None) for blob_id in session.execute(old.limit(_BATCH)).scalars()]


def collect_objects(ctx: Context, retention: Retention) -> int:
    """Objects that a crash left without a row that refers to them; how many."""
    return blobs.collect_objects(ctx.db, ctx.clock() - retention.garbage_s)
