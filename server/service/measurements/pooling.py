"""Evaluations pooled over clients: one accuracy per model."""

import logging
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from server.store.tables import Client, Evaluation, Federation
from shared.contract.measurements import Evaluation as Measured
from shared.contract.measurements import EvaluationReport
from shared.contract.messages import EvaluationView

logger = logging.getLogger(__name__)
_NOTHING = Measured(samples=0, correct=0, loss_sum=0.0)


def _evaluations(session: Session, federation: Federation, model_number: int) -> dict[str, Measured]:
    """Return the measurements of this model that count, by client id."""
    query = select(Evaluation).where(Evaluation.federation_id == federation.id, Evaluation.model_number == model_number)
    query = query.join(Client, Client.id == Evaluation.client_id).where(Client.counted)
    found = ((row.client_id, stored_evaluation(row.result)) for row in session.execute(query).scalars())
    return {client_id: result for client_id, result in found if result is not None}


@lru_cache(maxsize=4096)
def stored_evaluation(text: str) -> EvaluationReport | None:
    """Parse a stored evaluation; return None for impossible numbers accepted by an older release."""
    try:
        return EvaluationReport.model_validate_json(text)
    except ValidationError as error:
        logger.warning(
            "ignored an invalid stored evaluation: %s", error.errors(include_url=False, include_input=False)[0]
        )
        return None


def pooled(session: Session, federation: Federation, model_number: int) -> Measured:
    """Return the sum of all counted measurements of this model."""
    return pool(_evaluations(session, federation, model_number))


def pool(measured: Mapping[str, Measured]) -> Measured:
    """Add up the clients' measurements."""
    return sum(measured.values(), _NOTHING)


def pooled_accuracy(session: Session, federation: Federation, model_number: int) -> float | None:
    """Return the share of correct answers over all clients; None if none has reported."""
    return pooled(session, federation, model_number).accuracy


def pooled_accuracies(session: Session, federation: Federation, since: int = 0) -> dict[int, float | None]:
    """Return the pooled accuracy of every measured model from number `since` on, with one query."""
    query = select(Evaluation.model_number, Evaluation.result).join(Client, Client.id == Evaluation.client_id)
    correct, samples = Counter[int](), Counter[int]()  # adding up Measured objects takes as long as reading them
    query = query.where(Evaluation.federation_id == federation.id, Evaluation.model_number >= since, Client.counted)
    for number, text in session.execute(query):
        result = stored_evaluation(text) or _NOTHING
        correct[number] += result.correct
        samples[number] += result.samples
    return {number: correct[number] / count if count else None for number, count in samples.items()}


def describe_evaluation(result: Measured) -> EvaluationView:
    """Return counts with the rates derived from them."""
    return EvaluationView(
        samples=result.samples,
        accuracy=result.accuracy,
        loss=result.loss_sum / result.samples if result.samples else None,
        positive_accuracy=result.positive_accuracy,
        negative_accuracy=result.negative_accuracy,
        negatives_as_own=result.negatives_as_own / result.negatives if result.negatives else None,
        binary_accuracy=result.binary_accuracy,
    )
