"""What the clients measured, round by round."""

import csv
import io
import json
import logging
from collections.abc import Iterator
from functools import lru_cache

from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from server.store.tables import Client, Evaluation, Federation, Round, Update
from shared.evaluation import Evaluation as Measured
from shared.schemas import EvaluationView, TrainingReport, UpdateView

logger = logging.getLogger(__name__)
_NOTHING = Measured(samples=0, correct=0, loss_sum=0.0)


def evaluations(session: Session, federation: Federation, model_number: int) -> dict[str, Measured]:
    """What each client measured with this model, by client id."""
    query = select(Evaluation).where(Evaluation.federation_id == federation.id, Evaluation.model_number == model_number)
    found = ((row.client_id, _stored_evaluation(row.result)) for row in session.execute(query).scalars())
    return {client_id: result for client_id, result in found if result is not None}


@lru_cache(maxsize=4096)
def _stored_evaluation(text: str) -> Measured | None:
    """None for one that an older release took although it is impossible; it must not break what is told of others."""
    try:
        return Measured.model_validate_json(text)
    except ValidationError as error:
        logger.warning("a stored evaluation is ignored: %s", error.errors(include_url=False, include_input=False)[0])
        return None


def stored_report(text: str) -> TrainingReport:
    """A report as it was accepted; what an older release accepted is not judged again."""
    return TrainingReport.model_construct(**json.loads(text))


def pooled(session: Session, federation: Federation, model_number: int) -> Measured:
    """All clients' counts for this model in one."""
    return sum(evaluations(session, federation, model_number).values(), _NOTHING)


def pooled_accuracy(session: Session, federation: Federation, model_number: int) -> float | None:
    """Right answers over all answers; None while nobody has reported."""
    return pooled(session, federation, model_number).accuracy


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


def updates(session: Session, round_: Round, only_client: str | None = None) -> list[UpdateView]:
    """The updates of a round, or one client's."""
    query = (
        select(Update, Client.name)
        .join(Client, Client.id == Update.client_id)
        .where(Update.round_id == round_.id)
        .order_by(Client.name)
    )
    if only_client is not None:
        query = query.where(Update.client_id == only_client)
    return [
        UpdateView(
            client_id=update.client_id,
            client=name,
            digest=update.digest,
            size_bytes=update.size_bytes,
            received_at=update.received_at,
            report=stored_report(update.report),
        )
        for update, name in session.execute(query)
    ]


COLUMNS = (
    "round", "state", "client", "samples", "train_loss", "train_accuracy", "seconds", "offset_motion", "upload_bytes",
    "test_samples", "test_accuracy", "test_loss", "positive_accuracy", "negative_accuracy", "negatives_as_own",
    "binary_accuracy",
)  # fmt: skip


def metrics_rows(
    session: Session, federation: Federation, only_client: str | None = None
) -> Iterator[dict[str, object]]:
    """One row a round and client: its training, and its test of the model that the round made; pooled rows last."""
    clients = select(Client).where(Client.federation_id == federation.id)
    names = {client.id: client.name for client in session.execute(clients).scalars()}
    rounds = session.execute(select(Round).where(Round.federation_id == federation.id).order_by(Round.number)).scalars()
    for round_ in rounds.all():
        reports = {row.client_id: row for row in updates(session, round_)}
        tests = evaluations(session, federation, round_.number)
        for client_id, name in sorted(names.items(), key=lambda item: item[1]):
            update, test = reports.get(client_id), tests.get(client_id)
            if only_client not in (None, client_id) or (update is None and test is None):
                continue
            row: dict[str, object] = {"round": round_.number, "state": round_.state, "client": name}
            if update is not None:
                report = update.report
                row |= {
                    "samples": report.samples,
                    "train_loss": report.loss,
                    "train_accuracy": report.accuracy,
                    "seconds": report.seconds,
                    "offset_motion": report.offset_motion,
                    "upload_bytes": update.size_bytes,
                }
            yield row | (_test_columns(test) if test is not None else {})
        if only_client is None and tests:
            total = sum(tests.values(), _NOTHING)
            yield {"round": round_.number, "state": round_.state, "client": "(all)"} | _test_columns(total)


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


def metrics_csv(session: Session, federation: Federation, only_client: str | None = None) -> str:
    """`metrics_rows` as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(metrics_rows(session, federation, only_client))
    return text.getvalue()


def class_counts(client: Client) -> list[int]:
    """The class counts that a client registered."""
    return list(json.loads(client.class_counts))
