"""What clients measure with a global model on their held-out data."""

from server.core.errors import InvalidInput, NotFound
from server.service.context import Context
from server.service.enrolment import Identity
from server.service.history import pooled_accuracy
from server.store.session import LOCK
from server.store.tables import Evaluation, Federation, Model
from shared.evaluation import Evaluation as Measured


def submit(ctx: Context, identity: Identity, model_number: int, result: Measured) -> None:
    """Keep a client's measurement; a later one for the same model takes its place."""
    if not result.negatives_correct <= result.correct <= result.samples or not (
        result.negatives_as_own + result.negatives_correct <= result.negatives <= result.samples
    ):
        raise InvalidInput("inconsistent-evaluation", "The counts of the evaluation contradict each other.")
    with ctx.db.write() as session:
        federation = session.get_one(Federation, identity.federation_id, with_for_update=LOCK)
        if session.get(Model, (federation.id, model_number)) is None:
            raise NotFound("no-such-model", f"There is no model {model_number}.")
        session.merge(
            Evaluation(
                federation_id=federation.id,
                model_number=model_number,
                client_id=identity.client_id,
                result=result.model_dump_json(),
                received_at=ctx.clock(),
            )
        )
        session.flush()
        accuracy = pooled_accuracy(session, federation, model_number)
        best = federation.best_accuracy
        # While it runs, a model is judged when the next round is done; the last one has no next round.
        if federation.state == "finished" and accuracy is not None and (best is None or accuracy > best):
            federation.best_accuracy, federation.best_model = accuracy, model_number
