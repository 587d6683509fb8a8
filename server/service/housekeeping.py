"""What has to happen without anybody asking: deadlines, expiry of torn uploads, retention, garbage, heartbeats."""

import threading
from dataclasses import dataclass, field

from sqlalchemy import delete, exists, func, select, update
from sqlalchemy.orm import Session

from server.service.context import Context
from server.service.progress import advance, round_under_way, waiting_for
from server.service.uploads import drop_transfer
from server.store import blobs
from server.store.tables import Blob, Client, Federation, Invite, Model, Personal, Round, Transfer, Update


@dataclass(frozen=True)
class Retention:
    """How long things are kept that are no longer needed."""

    keep_round_uploads: int = 1  # the newest finished rounds of each federation whose uploads stay
    resumable_s: float = 24 * 3600.0  # a torn resumable upload waits so long for its rest
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
        if seen:
            with ctx.db.write() as session:
                for client_id, at in sorted(seen.items()):
                    session.execute(
                        update(Client).where(Client.id == client_id, Client.last_seen_at < at).values(last_seen_at=at)
                    )


def pass_deadlines(ctx: Context) -> None:
    """Move every running federation on as far as the clock allows; for a paused one time stands still."""
    with ctx.db.read() as session:
        running = select(Federation.id).where(Federation.state == "running")
        federation_ids = list(session.execute(running.order_by(Federation.id)).scalars())
    for federation_id in federation_ids:
        with ctx.db.read() as session:
            if not _is_due(session, ctx, session.get_one(Federation, federation_id)):
                continue
        with ctx.db.write() as session:
            advance(session, ctx, session.get_one(Federation, federation_id))


def _is_due(session: Session, ctx: Context, federation: Federation) -> bool:
    """Whether a write transaction is worth it; what uploads and leaving change, they change at once."""
    round_ = round_under_way(session, federation)
    if round_ is not None and ctx.clock() < round_.deadline_at:
        return False
    return federation.state == "running" and waiting_for(session, ctx, federation) is None


def clean(ctx: Context, retention: Retention) -> int:
    """Remove what nobody will ask for again; the number of blobs removed."""
    return (
        _expire_transfers(ctx, retention)
        + _drop_uploads(ctx, retention)
        + _drop_personals(ctx)
        + _collect(ctx, retention)
    )


def _expire_transfers(ctx: Context, retention: Retention) -> int:
    now = ctx.clock()
    with ctx.db.write() as session:
        rows = session.execute(select(Transfer, Round.state).join(Round, Round.id == Transfer.round_id)).all()
        expired = [
            transfer
            for transfer, state in rows
            if state != "open"
            or transfer.last_byte_at < now - (retention.resumable_s if transfer.resumable else retention.torn_s)
        ]
        for transfer in expired:
            drop_transfer(session, transfer)
        return len(expired)


def _drop_uploads(ctx: Context, retention: Retention) -> int:
    """The newest finished rounds of each federation keep their uploads; failed rounds count as well."""
    finished = Round.state.in_(["done", "failed"])
    newest = (
        select(Round.federation_id, func.max(Round.number).label("number"))
        .where(finished)
        .group_by(Round.federation_id)
        .subquery()
    )
    old = (
        select(Update)
        .join(Round, Round.id == Update.round_id)
        .join(newest, newest.c.federation_id == Round.federation_id)
        .where(
            Update.blob_id.is_not(None),
            finished,
            Round.number <= newest.c.number - retention.keep_round_uploads,
        )
    )
    with ctx.db.write() as session:
        rows = session.execute(old.limit(50)).scalars().all()
        for row in rows:
            blob_id, row.blob_id = row.blob_id, None
            session.flush()
            blobs.drop(session, str(blob_id))
        return len(rows)


def _drop_personals(ctx: Context) -> int:
    """Personal tensors go with models that have been followed by newer ones."""
    newest = (
        select(Model.federation_id, func.max(Model.number).label("number")).group_by(Model.federation_id).subquery()
    )
    old = (
        select(Personal)
        .join(newest, newest.c.federation_id == Personal.federation_id)
        .where(Personal.model_number < newest.c.number - 1)
    )
    with ctx.db.write() as session:
        rows = session.execute(old.limit(200)).scalars().all()
        for row in rows:
            blob_id = row.blob_id
            session.delete(row)
            session.flush()
            blobs.drop(session, blob_id)
        return len(rows)


def collect_objects(ctx: Context, retention: Retention) -> int:
    """Objects that a crash left without a row that refers to them; how many."""
    return blobs.collect_objects(ctx.db, ctx.clock() - retention.garbage_s)


def _collect(ctx: Context, retention: Retention) -> int:
    """Blobs that a crash left without anything that refers to them."""
    columns = [Model.blob_id, Model.private_blob_id, Update.blob_id, Transfer.blob_id, Personal.blob_id]
    orphans = select(Blob.id).where(
        Blob.created_at < ctx.clock() - retention.garbage_s,
        *[~exists().where(column == Blob.id) for column in columns],
    )
    with ctx.db.write() as session:
        ids = list(session.execute(orphans.limit(20)).scalars())
        for blob_id in ids:
            blobs.drop(session, blob_id)
        session.execute(delete(Invite).where(Invite.used_at.is_(None), Invite.expires_at < ctx.clock() - 30 * 86400))
        return len(ids)
