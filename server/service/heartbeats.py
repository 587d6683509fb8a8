"""Signs of life from clients, collected in memory and written together."""

import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from sqlalchemy import case, exists, or_, select, update
from sqlalchemy.orm import Session

from server.core.lifecycle import UNDER_WAY
from server.service.context import Context
from server.service.deadlines import advance_if_due
from server.service.isolation import FailureIsolation
from server.service.transitions import mark_seen
from server.service.uptime import uptime
from server.store.tables import Client, Federation, Participant, Round
from shared.contract.messages import StatusReport
from shared.contract.plan import MIN_ABSENT_AFTER_S

_CLOCK_WRONG_S = 60.0  # a stored time this far in the future came from a wrong clock


@dataclass(frozen=True)
class Heartbeat:
    """A client's last sign of life. If its agent cannot report, an earlier report is out of date."""

    at: float
    report: StatusReport | None = None
    reported_at: float = 0.0  # earlier than `at` if the agent has asked for work since
    can_report: bool = True


@dataclass
class Heartbeats:
    """When clients were last heard from, what they reported, and which rounds they were handed.

    Written together, so that a thousand agents cost one transaction every few seconds.
    """

    seen: dict[str, Heartbeat] = field(default_factory=dict)
    handed: dict[int, set[str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, client_id: str, now: float, round_id: int | None = None, *, can_report: bool = True) -> None:
        """Note a request from a client, which may have been handed a round."""
        with self._lock:
            known = self.seen.get(client_id, Heartbeat(now))
            report = known.report if can_report else None
            self.seen[client_id] = Heartbeat(now, report, known.reported_at, can_report)
            if round_id is not None:
                self.handed.setdefault(round_id, set()).add(client_id)

    def note_report(self, client_id: str, now: float, report: StatusReport) -> None:
        """Note a status report from a client's agent."""
        with self._lock:
            self.seen[client_id] = Heartbeat(now, report, now)

    def flush(self, ctx: Context, isolation: FailureIsolation | None = None) -> None:
        """Write everything noted so far; keep what the database cannot accept now for the next call."""
        isolation = isolation or FailureIsolation(ctx)
        with self._lock:
            seen, self.seen = self.seen, {}
            handed, self.handed = self.handed, {}
        try:
            if seen:
                waiting = _write_heartbeats(ctx, seen)
                seen = {}
                for federation_id in waiting:
                    with isolation.of(federation_id):
                        advance_if_due(ctx, federation_id)
            for round_id in sorted(handed):
                if _write_handed(ctx, isolation, round_id, handed[round_id]):
                    del handed[round_id]
        finally:
            with self._lock:
                self.seen = seen | self.seen
                for round_id, client_ids in handed.items():
                    self.handed.setdefault(round_id, set()).update(client_ids)


def _write_heartbeats(ctx: Context, seen: dict[str, Heartbeat]) -> list[int]:
    """Write heartbeats; return the federations between rounds to which one of these clients may have returned."""
    with ctx.db.write() as session:
        now = uptime(session)
        waiting = _federations_rejoined(session, seen, now)
        for client_id, beat in sorted(seen.items()):
            # Another process may have written a later time.
            is_older = (Client.last_seen_at < beat.at) | (Client.last_seen_at > beat.at + _CLOCK_WRONG_S)
            session.execute(
                update(Client)
                .where(Client.id == client_id)
                .values(heard_uptime=now, last_seen_at=case((is_older, beat.at), else_=Client.last_seen_at))
                .execution_options(synchronize_session=False)
            )
            _write_report(session, client_id, beat)
    return waiting


def _federations_rejoined(session: Session, client_ids: Iterable[str], now: float) -> list[int]:
    under_way = exists().where(Round.federation_id == Federation.id, Round.state.in_(UNDER_WAY))
    query = select(Federation.id).join(Client, Client.federation_id == Federation.id).distinct()
    returned = Client.id.in_(client_ids) & (Client.heard_uptime <= now - MIN_ABSENT_AFTER_S)
    return list(session.execute(query.where(returned, Federation.state == "running", ~under_way)).scalars())


def _write_report(session: Session, client_id: str, beat: Heartbeat) -> None:
    report = beat.report
    if report is not None:
        values = {
            "activity": report.activity,
            "activity_detail": report.detail,
            "troubles": json.dumps([trouble.model_dump() for trouble in report.troubles]),
            "status_at": beat.reported_at,
        }
        is_outdated = or_(  # another process may have a newer report
            Client.status_at.is_(None),
            Client.status_at < beat.reported_at,
            Client.status_at > beat.reported_at + _CLOCK_WRONG_S,
        )
    elif not beat.can_report:  # the site went back to an older agent, which is silent while it trains
        values = {"activity": "", "activity_detail": "", "troubles": "[]", "status_at": None}
        is_outdated = Client.status_at.is_not(None)
    else:
        return
    session.execute(
        update(Client)
        .where(Client.id == client_id, is_outdated)
        .values(**values)
        .execution_options(synchronize_session=False)
    )


def _write_handed(ctx: Context, isolation: FailureIsolation, round_id: int, client_ids: set[str]) -> bool:
    """Write which clients were handed the round; return False if the storage failed and it must be written again."""
    unseen = select(Participant.client_id).where(Participant.round_id == round_id, Participant.seen.is_(False))
    with ctx.db.read() as session:
        new = client_ids.intersection(session.execute(unseen).scalars())
        federation_id = session.execute(select(Round.federation_id).where(Round.id == round_id)).scalar()
    if not new or federation_id is None:
        return True
    with isolation.of(federation_id) as outcome, ctx.db.write() as session:
        mark_seen(session, ctx, round_id, new)
    return not outcome.storage_failed
