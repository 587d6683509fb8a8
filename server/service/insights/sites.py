"""The sites of a federation as operators need to see them: who works, who is late, who has trouble."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from server.service.context import Context
from server.service.insights.accuracies import read_score
from server.service.queries import load_federation, round_under_way
from server.store.tables import Absence, Client, Evaluation, Federation, Participant, Round, Transfer, Update
from shared.contract.messages import TroubleReport

RECENT_ROUNDS = 30
Part = Literal["uploaded", "uploading", "awaited", "not chosen", ""]  # in the round under way; "": there is none


@dataclass(frozen=True)
class SiteRow:
    """One site. Counts are over the last RECENT_ROUNDS rounds."""

    client: Client
    images: int | None  # None: withheld
    troubles: Sequence[TroubleReport]
    part: Part
    updates: int = 0
    missed: int = 0
    uploaded_bytes: int = 0
    accuracies: Sequence[float | None] = ()
    last_accuracy: float | None = None
    seconds: float | None = None  # its last training took

    @property
    def rank(self) -> tuple[object, ...]:
        """Sort key: those that need attention first."""
        return self.client.state != "active", not self.troubles, self.part != "awaited", self.client.name


@dataclass
class _Recent:
    rounds: Sequence[int] = ()  # ids
    numbers: Sequence[int] = ()
    updates: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    missed: Mapping[str, int] = field(default_factory=dict)


def site_rows(ctx: Context, name: str, page: int, per_page: int) -> tuple[list[SiteRow], int]:
    """Return one page of sites, those that need attention first, and how many sites there are."""
    with ctx.db.read() as session:
        federation = load_federation(session, name)
        clients = session.execute(select(Client).where(Client.federation_id == federation.id)).scalars().all()
        parts = _parts(session, federation)
        recent = _recent(session, federation)
        rows = [_row(client, parts, recent) for client in clients]
        rows.sort(key=lambda row: row.rank)
        shown = rows[(page - 1) * per_page : page * per_page]
        scores = _scores(session, federation, recent, [row.client.id for row in shown])
        seconds = _seconds(session, recent, [row.client.id for row in shown])
    return [_with_scores(row, recent, scores, seconds) for row in shown], len(rows)


def _parts(session: Session, federation: Federation) -> dict[str, Part] | None:
    under_way = round_under_way(session, federation)
    if under_way is None:
        return None
    query = (
        select(Participant.client_id, Update.client_id, Transfer.client_id)
        .outerjoin(Update, (Update.round_id == under_way.id) & (Update.client_id == Participant.client_id))
        .outerjoin(Transfer, (Transfer.round_id == under_way.id) & (Transfer.client_id == Participant.client_id))
        .where(Participant.round_id == under_way.id)
    )
    return {
        chosen: "uploaded" if uploaded else "uploading" if uploading else "awaited"
        for chosen, uploaded, uploading in session.execute(query)
    }


def _recent(session: Session, federation: Federation) -> _Recent:
    query = select(Round.id, Round.number).where(Round.federation_id == federation.id)
    rounds = session.execute(query.order_by(Round.number.desc()).limit(RECENT_ROUNDS)).all()
    ids = [row.id for row in rounds]
    updates = select(Update.client_id, func.count(), func.sum(Update.size_bytes)).where(Update.round_id.in_(ids))
    absences = select(Absence.client_id, func.count()).where(Absence.round_id.in_(ids))
    return _Recent(
        rounds=ids,
        numbers=sorted(row.number for row in rounds),
        updates={row[0]: (row[1], row[2]) for row in session.execute(updates.group_by(Update.client_id))},
        missed={row[0]: row[1] for row in session.execute(absences.group_by(Absence.client_id))},
    )


def _row(client: Client, parts: dict[str, Part] | None, recent: _Recent) -> SiteRow:
    counts = json.loads(client.class_counts)
    updates, uploaded_bytes = recent.updates.get(client.id, (0, 0))
    return SiteRow(
        client=client,
        images=sum(counts) or None,
        troubles=[TroubleReport.model_construct(**trouble) for trouble in json.loads(client.troubles)],
        part="" if parts is None else parts.get(client.id, "not chosen"),
        updates=updates,
        missed=recent.missed.get(client.id, 0),
        uploaded_bytes=uploaded_bytes,
    )


def _scores(
    session: Session, federation: Federation, recent: _Recent, client_ids: Sequence[str]
) -> dict[str, dict[int, float]]:
    query = select(Evaluation.client_id, Evaluation.model_number, Evaluation.result).where(
        Evaluation.federation_id == federation.id,
        Evaluation.model_number.in_(recent.numbers),
        Evaluation.client_id.in_(client_ids),
    )
    scores: dict[str, dict[int, float]] = defaultdict(dict)
    for client_id, number, text in session.execute(query):
        if score := read_score(text):
            scores[client_id][number] = score.accuracy
    return scores


def _seconds(session: Session, recent: _Recent, client_ids: Sequence[str]) -> dict[str, float]:
    """Return how long the last training of each client took."""
    query = select(Update.client_id, Update.report).where(
        Update.round_id.in_(recent.rounds[:3]), Update.client_id.in_(client_ids)
    )
    found = session.execute(query.order_by(Update.received_at)).all()
    return {client_id: float(json.loads(report).get("seconds", 0.0)) for client_id, report in found}


def _with_scores(
    row: SiteRow, recent: _Recent, scores: Mapping[str, Mapping[int, float]], seconds: Mapping[str, float]
) -> SiteRow:
    own = scores.get(row.client.id, {})
    accuracies = [own.get(number) for number in recent.numbers]
    measured = [value for value in accuracies if value is not None]
    return SiteRow(
        client=row.client,
        images=row.images,
        troubles=row.troubles,
        part=row.part,
        updates=row.updates,
        missed=row.missed,
        uploaded_bytes=row.uploaded_bytes,
        accuracies=accuracies,
        last_accuracy=measured[-1] if measured else None,
        seconds=seconds.get(row.client.id),
    )
