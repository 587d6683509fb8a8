"""Keeps track of a federation's best model and of how many rounds ago the accuracy last improved."""

from itertools import pairwise

from sqlalchemy import select
from sqlalchemy.orm import Session

from server.service.measurements.pooling import pooled, pooled_accuracies, pooled_accuracy
from server.service.queries import ancestry, base_of, latest_model
from server.store.tables import Client, Federation, Model


def update_best_model(session: Session, federation: Federation, model_number: int) -> None:
    """Compare a model that clients had a whole round to measure with the best one so far."""
    accuracy = pooled_accuracy(session, federation, model_number)
    _consider(federation, model_number, accuracy, is_copy=_is_copy(session, federation, model_number))


def consider_last_model(session: Session, federation: Federation, model_number: int) -> None:
    """Consider the last model of a finished federation, for which there is no later round.

    It must have been tested on as many images as the model before it: the first few sites to report may be easy ones.
    """
    before = base_of(session, federation, model_number)
    found = pooled(session, federation, model_number)
    wanted = 0 if before is None else pooled(session, federation, before).samples
    if found.accuracy is None or found.samples < wanted:
        return
    if federation.best_accuracy is None or found.accuracy > federation.best_accuracy:
        federation.best_accuracy, federation.best_model = found.accuracy, model_number


def exclude_measurements(session: Session, federation: Federation, *clients: Client) -> None:
    """Stop counting the measurements of these clients, and choose the best model again without them.

    Accuracies over different sets of clients cannot be compared: an older model could stay the best one forever.
    """
    for client in clients:
        client.counted = False
    session.flush()
    newest = latest_model(session, federation).number
    base = base_of(session, federation, newest)
    if base is not None:  # the newest model has not been considered yet
        recompute_best_model(session, federation, base)
    if federation.state == "finished":
        consider_last_model(session, federation, newest)


def recompute_best_model(session: Session, federation: Federation, number: int) -> None:
    """Recompute the best model from a model and its ancestors."""
    line = ancestry(session, federation, number)
    if federation.best_model is None or federation.best_model >= min(line):  # else it dates from before an import
        federation.best_accuracy = federation.best_model = None
    federation.stale_rounds = 0
    models = select(Model.number, Model.rounds_done).where(Model.federation_id == federation.id)
    rounds_done = {row.number: row.rounds_done for row in session.execute(models)}
    accuracies = pooled_accuracies(session, federation)
    bases = dict(pairwise(line))
    for ancestor in reversed(line):
        is_copy = ancestor in bases and rounds_done.get(ancestor) == rounds_done.get(bases[ancestor])
        _consider(federation, ancestor, accuracies.get(ancestor), is_copy=is_copy)


def _consider(federation: Federation, number: int, accuracy: float | None, *, is_copy: bool) -> None:
    if accuracy is None:
        return
    if federation.best_accuracy is None or accuracy > federation.best_accuracy:
        federation.best_accuracy, federation.best_model, federation.stale_rounds = accuracy, number, 0
    elif not is_copy:
        federation.stale_rounds += 1


def _is_copy(session: Session, federation: Federation, number: int) -> bool:
    """Return whether a rollback published this model, so that its accuracy was considered before."""
    base = base_of(session, federation, number)
    query = select(Model.rounds_done).where(Model.federation_id == federation.id, Model.number.in_([number, base]))
    return base is not None and len(set(session.execute(query).scalars())) == 1
