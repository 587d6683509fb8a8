"""What the clients measured, round by round."""

import csv
import io
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from pydantic import ValidationError
from sqlalchemy import func, select
from sqlalchemy.orm import Session, defer

from server.store.tables import Absence, Client, Evaluation, Federation, Participant, Round, Update
from shared.evaluation import Evaluation as Measured
from shared.schemas import EvaluationView, MissingView, TrainingReport, UpdateView

logger = logging.getLogger(__name__)
_PAGE_ROWS = 1000
_NOTHING = Measured(samples=0, correct=0, loss_sum=0.0)


def evaluations(session: Session, federation: Federation, model_number: int) -> dict[str, Measured]:
    """What each client whose measurements count measured with this model, by client id."""
    query = select(Evaluation).where(Evaluation.federation_id == federation.id, Evaluation.model_number == model_number)
    query = query.join(Client, Client.id == Evaluation.client_id).where(Client.counted)
    found = ((row.client_id, _stored_evaluation(row.result)) for row in session.execute(query).scalars())
    return {client_id: result for client_id, result in found if result is not None}


@lru_cache(maxsize=4096)
def _stored_evaluation(text: str) -> Measured | None:
    """Parse a stored evaluation; None for impossible numbers that an older release accepted."""
    try:
        return Measured.model_validate_json(text)
    except ValidationError as error:
        logger.warning("a stored evaluation is ignored: %s", error.errors(include_url=False, include_input=False)[0])
        return None


def stored_report(text: str) -> TrainingReport:
    """A report as it was accepted; what an older release accepted is not judged again."""
    return TrainingReport.model_construct(**json.loads(text))


def pooled(session: Session, federation: Federation, model_number: int) -> Measured:
    """The counts for this model of all clients that count, in one."""
    return pool(evaluations(session, federation, model_number))


def pool(measured: Mapping[str, Measured]) -> Measured:
    """The sum of the clients' counts."""
    return sum(measured.values(), _NOTHING)


def pooled_accuracy(session: Session, federation: Federation, model_number: int) -> float | None:
    """Right answers over all answers; None while nobody has reported."""
    return pooled(session, federation, model_number).accuracy


def pooled_accuracies(session: Session, federation: Federation) -> dict[int, float | None]:
    """The pooled accuracy of every model that somebody who counts has measured, read with one query."""
    query = select(Evaluation.model_number, Evaluation.result).join(Client, Client.id == Evaluation.client_id)
    correct, samples = Counter[int](), Counter[int]()  # adding up Measured takes as long as reading them
    for number, text in session.execute(query.where(Evaluation.federation_id == federation.id, Client.counted)):
        result = _stored_evaluation(text) or _NOTHING
        correct[number] += result.correct
        samples[number] += result.samples
    return {number: correct[number] / count if count else None for number, count in samples.items()}


def describe_evaluation(result: Measured) -> EvaluationView:
    """Counts together with the rates that follow from them."""
    return EvaluationView(
        samples=result.samples,
        accuracy=result.accuracy,
        loss=result.loss_sum / result.samples if result.samples else None,
        positive_accuracy=result.positive_accuracy,
        negative_accuracy=result.negative_accuracy,
        negatives_as_own=result.negatives_as_own / result.negatives if result.negatives else None,
        binary_accuracy=result.binary_accuracy,
    )


@dataclass(frozen=True)
class RoundRecord:
    """A round with what came in for it; a client's own part only when it is for that client."""

    round: Round
    participants: int
    landed: int  # updates of all clients
    updates: list[UpdateView]
    evaluations: dict[str, Measured]  # of the model that the round made, by client id
    counted: set[str]  # clients whose measurements are pooled
    names: dict[str, str]  # of the clients in the two above, by id
    missing: list[MissingView] = field(default_factory=list)

    @property
    def pooled(self) -> Measured:
        """What the clients that count measured together."""
        return pool({key: value for key, value in self.evaluations.items() if key in self.counted})


def page_size(session: Session, federation: Federation, only_client: str | None) -> int:
    """Rounds that hold about `_PAGE_ROWS` rows together."""
    clients = select(func.count()).where(Client.federation_id == federation.id)
    return max(1, _PAGE_ROWS // max(1, session.execute(clients).scalar_one() if only_client is None else 1))


def records(
    session: Session, federation: Federation, only_client: str | None, after: int, limit: int
) -> list[RoundRecord]:
    """The rounds after a number, oldest first, read with six queries however many they are."""
    query = select(Round).where(Round.federation_id == federation.id, Round.number > after)
    found = query.order_by(Round.number).limit(limit).options(defer(Round.roster))  # of everybody's class counts
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
        measured, record = _stored_evaluation(test.result), by_number.get(test.model_number)
        if measured is not None and record is not None:  # no round made an imported model
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
        report=stored_report(update.report),
    )


COLUMNS = (
    "round", "state", "client", "samples", "train_loss", "train_accuracy", "seconds", "offset_motion", "upload_bytes",
    "test_samples", "test_accuracy", "test_loss", "positive_accuracy", "negative_accuracy", "negatives_as_own",
    "binary_accuracy",
)  # fmt: skip


def metrics_rows(record: RoundRecord, only_client: str | None) -> Iterator[dict[str, object]]:
    """One row per client with its training and its test of the model that the round made, then the pooled tests.

    Pooled are the tests of the clients that count: those that did not leave before the federation ended.
    """
    round_: dict[str, object] = {"round": record.round.number, "state": record.round.state}
    updates = {update.client_id: update for update in record.updates}
    for client_id, name in sorted(record.names.items(), key=lambda item: (item[1], item[0])):
        row = round_ | {"client": name}
        if update := updates.get(client_id):
            report = update.report
            row |= {
                "samples": report.samples,
                "train_loss": report.loss,
                "train_accuracy": report.accuracy,
                "seconds": report.seconds,
                "offset_motion": report.offset_motion,
                "upload_bytes": update.size_bytes,
            }
        test = record.evaluations.get(client_id)
        yield row | (_test_columns(test) if test is not None else {})
    if only_client is None and record.counted:
        yield round_ | {"client": "(all)"} | _test_columns(record.pooled)


def _test_columns(result: Measured) -> dict[str, object]:
    view = describe_evaluation(result)
    return {
        "test_samples": view.samples,
        "test_accuracy": view.accuracy,
        "test_loss": view.loss,
        "positive_accuracy": view.positive_accuracy,
        "negative_accuracy": view.negative_accuracy,
        "negatives_as_own": view.negatives_as_own,
        "binary_accuracy": view.binary_accuracy,
    }


def csv_text(found: Iterable[RoundRecord], only_client: str | None = None, *, header: bool = False) -> str:
    """`metrics_rows` of these rounds as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    if header:
        writer.writeheader()
    for record in found:
        writer.writerows(metrics_rows(record, only_client))
    return text.getvalue()
