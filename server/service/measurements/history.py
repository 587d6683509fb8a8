"""Rounds with everything that came in for them, read page by page."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from sqlalchemy import func, select
from sqlalchemy.orm import Session, defer

from server.service.context import Context
from server.service.measurements.pooling import pool, stored_evaluation
from server.service.queries import load_federation
from server.store.tables import Absence, Client, Evaluation, Federation, Participant, Round, Update
from shared.contract.measurements import Evaluation as Measured
from shared.contract.measurements import EvaluationReport, TrainingReport
from shared.contract.messages import MissingView, UpdateView

T = TypeVar("T")
_PAGE_ROWS = 1000


@dataclass(frozen=True)
class RoundRecord:
    """A round with its updates and measurements; a client sees only its own."""

    round: Round
    participants: int
    landed: int  # number of updates of all clients
    updates: list[UpdateView]
    evaluations: dict[str, EvaluationReport]  # of the round's result, by client id
    counted: set[str]  # clients whose measurements are pooled
    names: dict[str, str]  # client names by id
    missing: list[MissingView] = field(default_factory=list)

    @property
    def pooled(self) -> Measured:
        """The sum of all counted measurements."""
        return pool({key: value for key, value in self.evaluations.items() if key in self.counted})


def _page_size(session: Session, federation: Federation, only_client: str | None) -> int:
    """Return a number of rounds that amounts to about `_PAGE_ROWS` rows."""
    clients = select(func.count()).where(Client.federation_id == federation.id)
    return max(1, _PAGE_ROWS // max(1, session.execute(clients).scalar_one() if only_client is None else 1))


@dataclass(frozen=True)
class Selection:
    """The rounds of a federation to read: those after a number, for the operator or for one client."""

    name: str
    only_client: str | None
    after: int = 0
    limit: int | None = None


def pages(ctx: Context, wanted: Selection, read: Callable[[Session, list[RoundRecord]], T]) -> Iterator[T]:
    """Yield the result of `read` for each page of rounds, oldest first, in a short transaction per page.

    Rounds are only ever added, so pages read at different moments fit together.
    """
    after, limit = wanted.after, wanted.limit
    while limit is None or limit > 0:
        with ctx.db.read() as session:
            federation = load_federation(session, wanted.name)
            size = _page_size(session, federation, wanted.only_client)
            size = size if limit is None else min(size, limit)
            found = records(session, federation, wanted.only_client, after, size)
            page = read(session, found)
        if found:
            yield page
        if len(found) < size:
            return
        after, limit = found[-1].round.number, None if limit is None else limit - size


def records(
    session: Session, federation: Federation, only_client: str | None, after: int, limit: int
) -> list[RoundRecord]:
    """Return the rounds after a number, oldest first, with six queries however many there are."""
    query = select(Round).where(Round.federation_id == federation.id, Round.number > after)
    found = query.order_by(Round.number).limit(limit).options(defer(Round.roster))  # large, and not needed
    rounds = session.execute(found).scalars().all()
    if not rounds:
        return []
    ids = [round_.id for round_ in rounds]
    updates, tests = select(Update, Client.name), select(Evaluation, Client.name, Client.counted)
    updates = updates.join(Client, Client.id == Update.client_id).where(Update.round_id.in_(ids))
    tests = tests.join(Client, Client.id == Evaluation.client_id).where(
        Evaluation.federation_id == federation.id,
        Evaluation.model_number.between(rounds[0].number, rounds[-1].number),
    )
    if only_client is not None:
        updates, tests = updates.where(Update.client_id == only_client), tests.where(Client.id == only_client)
    participants, landed = _count_by_round(session, Participant, ids), _count_by_round(session, Update, ids)
    by_id = {
        round_.id: RoundRecord(round_, participants.get(round_.id, 0), landed.get(round_.id, 0), [], {}, set(), {})
        for round_ in rounds
    }
    by_number = {record.round.number: record for record in by_id.values()}
    for update, name in session.execute(updates.order_by(Client.name, Client.id)):
        by_id[update.round_id].updates.append(_update_view(update, name))
        by_id[update.round_id].names[update.client_id] = name
    absences = select(Absence, Client.name).join(Client, Client.id == Absence.client_id)
    absences = absences.where(Absence.round_id.in_(ids))
    if only_client is not None:
        absences = absences.where(Absence.client_id == only_client)
    for absence, name in session.execute(absences.order_by(Client.name, Client.id)):
        by_id[absence.round_id].missing.append(MissingView(client=name, reason=absence.reason))
    for test, name, counts in session.execute(tests.order_by(Client.name, Client.id)):
        measured, record = stored_evaluation(test.result), by_number.get(test.model_number)
        if measured is not None and record is not None:  # an imported model has no round
            record.evaluations[test.client_id] = measured
            record.names[test.client_id] = name
            if counts:
                record.counted.add(test.client_id)
    return list(by_id.values())


def _count_by_round(session: Session, table: type[Participant | Update], ids: list[int]) -> dict[int, int]:
    query = select(table.round_id, func.count()).where(table.round_id.in_(ids)).group_by(table.round_id)
    return {row[0]: row[1] for row in session.execute(query)}


def _update_view(update: Update, name: str) -> UpdateView:
    return UpdateView(
        client_id=update.client_id,
        client=name,
        digest=update.digest,
        size_bytes=update.size_bytes,
        received_at=update.received_at,
        report=_stored_report(update.report),
    )


def _stored_report(text: str) -> TrainingReport:
    """Return a report as it was accepted, without validating it again: older releases accepted other values."""
    return TrainingReport.model_construct(**json.loads(text))
