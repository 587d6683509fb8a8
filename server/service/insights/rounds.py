"""What made a round long: when each site's update arrived, and how much of that time was training."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session, defer

from server.core.errors import NotFound
from server.service.context import Context
from server.service.queries import load_federation
from server.store.tables import Absence, Client, Federation, Participant, Round, Transfer, Update

LISTED_ROUNDS = 20


@dataclass(frozen=True)
class SitePart:
    """One site's part in a round; times are seconds since the round opened."""

    client: str
    received_s: float | None  # None: no update so far
    training_s: float | None
    upload_began_s: float | None  # of an upload in progress
    reason: str = ""  # why there is no update


@dataclass(frozen=True)
class RoundParts:
    """A round and what each of its sites did."""

    number: int
    state: str
    opened_at: float
    ended_s: float  # seconds until it ended, or until now
    collected_s: float  # until the last update arrived, or until now if more may come
    parts: Sequence[SitePart]


@dataclass(frozen=True)
class RoundLine:
    """A round in one line: how long it took, and for whom it waited longest."""

    number: int
    state: str
    reason: str
    opened_at: float
    closed_at: float | None
    participants: int
    updates: int
    last_s: float | None  # seconds until the last update arrived
    middle_s: float | None  # seconds until the median update arrived
    slowest: str


def round_lines(ctx: Context, name: str) -> list[RoundLine]:
    """Return the last LISTED_ROUNDS rounds, newest first."""
    with ctx.db.read() as session:
        federation = load_federation(session, name)
        query = select(Round).where(Round.federation_id == federation.id).order_by(Round.number.desc())
        rounds = session.execute(query.limit(LISTED_ROUNDS).options(defer(Round.roster))).scalars().all()
        ids = [one.id for one in rounds]
        counted = select(Participant.round_id, func.count()).where(Participant.round_id.in_(ids))
        participants = {row[0]: row[1] for row in session.execute(counted.group_by(Participant.round_id))}
        arrivals = select(Update.round_id, Update.received_at, Client.name)
        arrivals = arrivals.join(Client, Client.id == Update.client_id).where(Update.round_id.in_(ids))
        received: dict[int, list[tuple[float, str]]] = {}
        for round_id, at, client in session.execute(arrivals.order_by(Update.received_at)):
            received.setdefault(round_id, []).append((at, client))
    return [_line(one, participants.get(one.id, 0), received.get(one.id, [])) for one in rounds]


def _line(round_: Round, participants: int, received: Sequence[tuple[float, str]]) -> RoundLine:
    return RoundLine(
        number=round_.number,
        state=round_.state,
        reason=round_.reason,
        opened_at=round_.opened_at,
        closed_at=round_.closed_at if round_.state in ("done", "failed") else None,
        participants=participants,
        updates=len(received),
        last_s=max(0.0, received[-1][0] - round_.opened_at) if received else None,
        middle_s=max(0.0, received[len(received) // 2][0] - round_.opened_at) if received else None,
        slowest=received[-1][1] if received else "",
    )


def round_parts(ctx: Context, name: str, number: int | None = None) -> RoundParts | None:
    """Return what each site did in a round, by default the newest that has participants; None before the first."""
    with ctx.db.read() as session:
        federation = load_federation(session, name)
        round_ = _find(session, federation, number)
        if round_ is None:
            return None
        query = (
            select(Client.name, Update.received_at, Update.report, Transfer.started_at, Absence.reason)
            .join(Participant, Participant.client_id == Client.id)
            .outerjoin(Update, (Update.round_id == round_.id) & (Update.client_id == Client.id))
            .outerjoin(Transfer, (Transfer.round_id == round_.id) & (Transfer.client_id == Client.id))
            .outerjoin(Absence, (Absence.round_id == round_.id) & (Absence.client_id == Client.id))
            .where(Participant.round_id == round_.id)
            .order_by(Client.name)
        )
        rows = session.execute(query).all()
    opened, is_over = round_.opened_at, round_.state in ("done", "failed")
    ended = max(0.0, ((round_.closed_at or opened) if is_over else ctx.clock()) - opened)
    parts = [
        SitePart(
            client=client,
            received_s=None if received is None else max(0.0, received - opened),
            training_s=None if report is None else float(json.loads(report).get("seconds", 0.0)),
            upload_began_s=None if began is None else max(0.0, began - opened),
            reason=reason or "",
        )
        for client, received, report, began, reason in rows
    ]
    arrived = [part.received_s for part in parts if part.received_s is not None]
    collected = max(arrived, default=ended) if round_.state != "open" else ended
    return RoundParts(round_.number, round_.state, opened, ended, min(collected, ended), parts)


def _find(session: Session, federation: Federation, number: int | None) -> Round | None:
    query = select(Round).where(Round.federation_id == federation.id).options(defer(Round.roster))
    if number is None:
        chosen = select(Participant.round_id).where(Participant.round_id == Round.id).exists()
        return session.execute(query.where(chosen).order_by(Round.number.desc()).limit(1)).scalar_one_or_none()
    found = session.execute(query.where(Round.number == number)).scalar_one_or_none()
    if found is None:
        raise NotFound("no-such-round", f"Federation {federation.name!r} has no round {number}.")
    return found
