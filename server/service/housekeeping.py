"""What has to happen without anybody asking: deadlines, expiry of torn uploads, retention, garbage, heartbeats."""

import threading
from dataclasses import dataclass, field

from sqlalchemy import delete, exists, func, select, update

from server.service.context import Context
from server.service.isolation import Isolation
from server.service.progress import advance, note_seen, waiting_for
from server.service.uploads import drop_transfer
from server.service.uptime import uptime
from server.store import blobs
from server.store.tables import Blob, Client, Federation, Invite, Model, Participant, Personal, Round, Transfer, Update


@dataclass(frozen=True)
class Retention:
    """How long things are kept that are no longer needed."""

    keep_round_uploads: int = 1  # the newest finished rounds of each federation whose uploads stay
    resumable_s: float = 24 * 3600.0  # a torn resumable upload waits so long for its rest
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
            for round_id in sorted(handed):
                _write_handed(ctx, isolation, round_id, handed[round_id])
                del handed[round_id]
        finally:
            with self._lock:
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


def clean(ctx: Context, retention: Retention) -> int:
    """Remove what nobody will ask for again; the number of blobs removed."""
    return (
        _expire_transfers(ctx, retention)
        + _drop_uploads(ctx, retention)
        + _drop_personals(ctx)
        + _collect(ctx, retention)
    )


def _expire_transfers(ctx: Context, retention: Retention) -> int:
    with ctx.db.write() as session:
        now = uptime(session)
        rows = session.execute(select(Transfer, Round.state).join(Round, Round.id == Transfer.round_id)).all()
        expired = [
            transfer
            for transfer, state in rows
            if state != "open"
            or transfer.touched_uptime < now - (retention.resumable_s if transfer.resumable else retention.torn_s)
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
