"""What has to happen without anybody asking: deadlines, expiry of torn uploads, retention, garbage, heartbeats."""

import logging
import threading
from dataclasses import dataclass, field

from sqlalchemy import case, delete, func, or_, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.sql.dml import UpdateBase

from server.service.context import Context
from server.service.progress import advance, round_under_way, waiting_for
from server.store import blobs
from server.store.failures import is_busy
from server.store.tables import Blob, Client, Federation, Invite, Model, Personal, Round, Transfer, Update

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
    """When clients were last heard of; written to the database together, now and then."""

    seen: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, client_id: str, now: float) -> None:
        """A client has spoken."""
        with self._lock:
            self.seen[client_id] = now

    def flush(self, ctx: Context) -> None:
        """Write down what was noted."""
        with self._lock:
            seen, self.seen = self.seen, {}
        if not seen:
            return
        try:
            with ctx.db.write() as session:
                for client_id, at in sorted(seen.items()):
                    session.execute(
                        update(Client).where(Client.id == client_id, Client.last_seen_at < at).values(last_seen_at=at)
                    )
        except SQLAlchemyError:
            with self._lock:
                self.seen = seen | self.seen
            raise


def pass_deadlines(ctx: Context) -> None:
    """Move every running federation on as far as the clock allows; for a paused one time stands still."""
    with ctx.db.read() as session:
        running = select(Federation.id).where(Federation.state == "running")
        federation_ids = list(session.execute(running.order_by(Federation.id)).scalars())
    for federation_id in federation_ids:
        with ctx.db.read() as session:
            if not _is_due(session, ctx, session.get_one(Federation, federation_id)):
                continue
        try:
            with ctx.db.write() as session:
                advance(session, ctx, session.get_one(Federation, federation_id))
        except SQLAlchemyError as error:
            if not is_busy(error):
                raise
            logger.warning("federation %d is locked by another process; it will be looked at again", federation_id)


def _is_due(session: Session, ctx: Context, federation: Federation) -> bool:
    """Whether a write transaction is worth it; what uploads and leaving change, they change at once."""
    round_ = round_under_way(session, federation)
    if round_ is not None and ctx.clock() < round_.deadline_at:
        return False
    return federation.state == "running" and waiting_for(session, ctx, federation) is None


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
    now = ctx.clock()
    patience_s = case((Transfer.resumable, retention.resumable_s), else_=retention.torn_s)
    expired = (
        select(Transfer)
        .join(Round, Round.id == Transfer.round_id)
        .where(or_(Round.state != "open", Transfer.last_byte_at < now - patience_s))
    )
    with ctx.db.read() as session:
        rows = session.execute(expired.limit(_BATCH)).scalars().all()
    return [
        # Not one that has grown meanwhile.
        (row.blob_id, delete(Transfer).where(Transfer.id == row.id, Transfer.last_byte_at == row.last_byte_at))
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
