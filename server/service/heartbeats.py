"""Signs of life from clients, collected in memory and written together."""

import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from sqlalchemy import Float, bindparam, case, exists, or_, select, update
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

# No parameter is called like a column: SQLAlchemy would set that column, too.
_AT, _REPORTED_AT = bindparam("at", type_=Float), bindparam("reported_at", type_=Float)
_CLIENT = update(Client).where(Client.id == bindparam("client"))
_HEARD = _CLIENT.values(
    heard_uptime=bindparam("now"),
    last_seen_at=case(
        # Another process may have written a later time.
        ((Client.last_seen_at < _AT) | (Client.last_seen_at > _AT + _CLOCK_WRONG_S), _AT),
        else_=Client.last_seen_at,
    ),
)
_REPORTED = _CLIENT.where(
    or_(  # another process may have a newer report
        Client.status_at.is_(None),
        Client.status_at < _REPORTED_AT,
        Client.status_at > _REPORTED_AT + _CLOCK_WRONG_S,
    )
).values(
    activity=bindparam("report_activity"),
    activity_detail=bindparam("report_detail"),
    troubles=bindparam("report_troubles"),
    status_at=_REPORTED_AT,
)
# The site went back to an older agent, which is silent while it trains.
_SILENT = _CLIENT.where(Client.status_at.is_not(None)).values(
    activity="", activity_detail="", troubles="[]", status_at=None
)


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
        # Sorted, so that two processes lock the rows in the same order; together, because a round trip each takes long.
        rows = [_row(client_id, beat, now) for client_id, beat in sorted(seen.items())]
        reporting = [row for row in rows if "reported_at" in row]
        silent = [row for row in rows if not row["can_report"]]
        for statement, chosen in ((_HEARD, rows), (_REPORTED, reporting), (_SILENT, silent)):
            if chosen:
                session.connection().execute(statement, chosen)
    return waiting


def _row(client_id: str, beat: Heartbeat, now: float) -> dict[str, object]:
    row: dict[str, object] = {"client": client_id, "at": beat.at, "now": now, "can_report": beat.can_report}
    if beat.report is not None:
        row |= {
            "report_activity": beat.report.activity,
            "report_detail": beat.report.detail,
            "report_troubles": json.dumps([trouble.model_dump() for trouble in beat.report.troubles]),
            "reported_at": beat.reported_at,
        }
    return row


def _federations_rejoined(session: Session, client_ids: Iterable[str], now: float) -> list[int]:
    under_way = exists().where(Round.federation_id == Federation.id, Round.state.in_(UNDER_WAY))
    query = select(Federation.id).join(Client, Client.federation_id == Federation.id).distinct()
    returned = Client.id.in_(client_ids) & (Client.heard_uptime <= now - MIN_ABSENT_AFTER_S)
    return list(session.execute(query.where(returned, Federation.state == "running", ~under_way)).scalars())


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
