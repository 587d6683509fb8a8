"""Whether more rounds would have helped, from the pooled accuracies of a federation's models."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from server.core.convergence import is_near_end, last_rounds, more_rounds
from server.service.measurements.pooling import pooled_accuracies
from server.service.queries import ancestry, latest_model
from server.store.tables import Federation, Model


def suggest_rounds(session: Session, federation: Federation, rounds_total: int) -> int | None:
    """Return about how many more rounds would help a federation whose rounds are over, or almost over; else None."""
    if federation.state == "cancelled" or not is_near_end(federation.completed_rounds, rounds_total):
        return None
    first = rounds_total - last_rounds(rounds_total)
    query = select(Model.number, Model.rounds_done).where(
        Model.federation_id == federation.id, Model.rounds_done > first
    )
    rounds_done = {row.number: row.rounds_done for row in session.execute(query)}
    if not rounds_done:
        return None
    measured = pooled_accuracies(session, federation, since=min(rounds_done))
    accuracies = {}
    for number in reversed(ancestry(session, federation, latest_model(session, federation).number)):
        accuracy = measured.get(number)
        if number in rounds_done and accuracy is not None:
            accuracies[rounds_done[number]] = accuracy  # a rollback's copy replaces the model it copies
    return more_rounds(accuracies, rounds_total)
