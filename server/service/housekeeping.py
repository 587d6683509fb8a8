"""What has to happen without anybody asking: deadlines and heartbeats."""

import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from sqlalchemy import case, exists, or_, select, update
from sqlalchemy.orm import Session

from server.service.context import Context
from server.service.isolation import Isolation
from server.service.progress import advance, note_seen, waiting_for
from server.service.uptime import uptime
from server.store.tables import Client, Federation, Participant, Round
from shared.plan import MIN_ABSENT_AFTER_S
from shared.schemas import StatusReport

_CLOCK_WRONG_S = 60.0  # a moment further ahead than this comes from a clock that was wrong


@dataclass(frozen=True)
class Sign:
    """A client's last sign of life; without a report from an agent that makes none, the last one is out of date."""

    at: float
    report: StatusReport | None = None
    reported_at: float = 0.0  # earlier than `at` if the agent has asked for work since
    can_report: bool = True


@dataclass
class Heartbeats:
    """When clients were last heard of, what they reported and which rounds they were handed; written together.

    A thousand agents thus cost one transaction every few seconds, whatever they report.
    """

    seen: dict[str, Sign] = field(default_factory=dict)
    handed: dict[int, set[str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, client_id: str, now: float, round_id: int | None = None, *, can_report: bool = True) -> None:
        """A client has spoken, and may have been handed its part in a round."""
        with self._lock:
            known = self.seen.get(client_id, Sign(now))
            report = known.report if can_report else None
            self.seen[client_id] = Sign(now, report, known.reported_at, can_report)
            if round_id is not None:
                self.handed.setdefault(round_id, set()).add(client_id)

    def note_report(self, client_id: str, now: float, report: StatusReport) -> None:
        """A client's agent has said what it is doing."""
        with self._lock:
            self.seen[client_id] = Sign(now, report, now)

    def flush(self, ctx: Context, isolation: Isolation | None = None) -> None:
        """Write down what was noted; what the database does not take now is kept for the next time."""
        isolation = isolation or Isolation(ctx)
        with self._lock:
            seen, self.seen = self.seen, {}
            handed, self.handed = self.handed, {}
        try:
            if seen:
                waiting = _write_signs(ctx, seen)
                seen = {}
                for federation_id in waiting:
                    with isolation.of(federation_id):
                        _move_on(ctx, federation_id)
            for round_id in sorted(handed):
                if _write_handed(ctx, isolation, round_id, handed[round_id]):
                    del handed[round_id]
        finally:
            with self._lock:
                self.seen = seen | self.seen
                for round_id, client_ids in handed.items():
                    self.handed.setdefault(round_id, set()).update(client_ids)


def _write_signs(ctx: Context, seen: dict[str, Sign]) -> list[int]:
    """Return the federations without a round under way that one of these clients may have come back to."""
    with ctx.db.write() as session:
        now = uptime(session)
        waiting = _federations_rejoined(session, seen, now)
        for client_id, sign in sorted(seen.items()):
            session.execute(
                update(Client)
                .where(Client.id == client_id)
                .values(
                    heard_uptime=now,
                    # Another process may have written a later moment.
                    last_seen_at=case(
                        (
                            (Client.last_seen_at < sign.at) | (Client.last_seen_at > sign.at + _CLOCK_WRONG_S),
                            sign.at,
                        ),
                        else_=Client.last_seen_at,
                    ),
                )
                .execution_options(synchronize_session=False)
            )
            _write_report(session, client_id, sign)
    return waiting


def _federations_rejoined(session: Session, client_ids: Iterable[str], now: float) -> list[int]:
    under_way = exists().where(Round.federation_id == Federation.id, Round.state.in_(["open", "aggregating"]))
    query = select(Federation.id).join(Client, Client.federation_id == Federation.id).distinct()
    returned = Client.id.in_(client_ids) & (Client.heard_uptime <= now - MIN_ABSENT_AFTER_S)
    return list(session.execute(query.where(returned, Federation.state == "running", ~under_way)).scalars())


def _write_report(session: Session, client_id: str, sign: Sign) -> None:
    report = sign.report
    if report is not None:
        values = {
            "activity": report.activity,
            "activity_detail": report.detail,
            "troubles": json.dumps([trouble.model_dump() for trouble in report.troubles]),
            "status_at": sign.reported_at,
        }
        outdated = or_(  # another process may have been told something newer
            Client.status_at.is_(None),
            Client.status_at < sign.reported_at,
            Client.status_at > sign.reported_at + _CLOCK_WRONG_S,
        )
    elif not sign.can_report:  # the site went back to an older agent, which is silent while it trains
        values = {"activity": "", "activity_detail": "", "troubles": "[]", "status_at": None}
        outdated = Client.status_at.is_not(None)
    else:
        return
    session.execute(
        update(Client)
        .where(Client.id == client_id, outdated)
        .values(**values)
        .execution_options(synchronize_session=False)
    )


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
        now = uptime(session)
        untimed = Federation.due_uptime.is_(None) & ~aggregating  # of an older release
        due = select(Federation.id).where(
            Federation.state == "running", or_(untimed, Federation.due_uptime <= now, Federation.look_uptime <= now)
        )
        federation_ids = list(session.execute(due.order_by(Federation.id)).scalars())
    for federation_id in federation_ids:
        with isolation.of(federation_id):
            _move_on(ctx, federation_id)


def _move_on(ctx: Context, federation_id: int) -> None:
    with ctx.db.read() as session:
        federation = session.get_one(Federation, federation_id)
        is_looked_at = federation.look_uptime is None or federation.look_uptime > uptime(session)
        if federation.due_uptime is not None and is_looked_at and waiting_for(session, ctx, federation) is not None:
            return  # such as for an upload that still grows: a write transaction would only be in its way
    with ctx.db.write() as session:
        advance(session, ctx, session.get_one(Federation, federation_id))
