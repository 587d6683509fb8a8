"""What has to happen without anybody asking: deadlines and heartbeats."""

import threading
from dataclasses import dataclass, field

from sqlalchemy import exists, select, update

from server.service.context import Context
from server.service.isolation import Isolation
from server.service.progress import advance, note_seen, waiting_for
from server.service.uptime import uptime
from server.store.tables import Client, Federation, Participant, Round


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
                if _write_handed(ctx, isolation, round_id, handed[round_id]):
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


def _write_handed(ctx: Context, isolation: Isolation, round_id: int, client_ids: set[str]) -> bool:
    """False when the storage failed, so that it has to be written again."""
    unseen = select(Participant.client_id).where(Participant.round_id == round_id, Participant.seen.is_(False))
    with ctx.db.read() as session:
        new = client_ids.intersection(session.execute(unseen).scalars())
        federation_id = session.execute(select(Round.federation_id).where(Round.id == round_id)).scalar()
    if not new or federation_id is None:
        return True
    with isolation.of(federation_id) as outcome, ctx.db.write() as session:
        note_seen(session, ctx, round_id, new)
    return not outcome.storage_failed


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
