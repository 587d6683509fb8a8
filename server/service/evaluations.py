"""What clients measure with a global model on their held-out data."""

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from server.core.errors import InvalidInput, NotFound
from server.service.context import Context
from server.service.enrolment import Identity
from server.service.history import pooled
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
        # While it runs, a model is judged when the next round is done; the last one has no next round.
        if federation.state == "finished":
            _judge_last(session, federation, model_number)


def _judge_last(session: Session, federation: Federation, model_number: int) -> None:
    """Once it was tested on as many images as the model before it: a few sites alone may be the easy ones."""
    earlier = select(func.max(Model.number)).where(Model.federation_id == federation.id, Model.number < model_number)
    before = session.execute(earlier).scalar()
    found = pooled(session, federation, model_number)
    wanted = 0 if before is None else pooled(session, federation, before).samples
    if found.accuracy is None or found.samples < wanted:
        return
    if federation.best_accuracy is None or found.accuracy > federation.best_accuracy:
        federation.best_accuracy, federation.best_model = found.accuracy, model_number
