"""What clients measure with a global model on their held-out data."""

from server.core.errors import InvalidInput, NotFound
from server.service.context import Context, client_record
from server.service.enrolment import Identity, refuse_outdated
from server.service.models import judge_last
from server.store.session import LOCK
from server.store.tables import Client, Evaluation, Federation, Model
from shared.evaluation import Evaluation as Measured
from shared.schemas import MAX_LOSS


def submit(ctx: Context, identity: Identity, model_number: int, result: Measured) -> None:
    """Keep a client's measurement; a later one for the same model takes its place."""
    if not result.negatives_correct <= result.correct <= result.samples or not (
        result.negatives_as_own + result.negatives_correct <= result.negatives <= result.samples
    ):
        raise InvalidInput("inconsistent-evaluation", "The counts of the evaluation contradict each other.")
    if result.loss_sum > MAX_LOSS * result.samples:
        raise InvalidInput(
            "absurd-loss", f"A loss_sum of {result.loss_sum:.3g} is more than {MAX_LOSS:.0e} per held-out image."
        )
    with ctx.db.write() as session:
        federation = session.get(Federation, identity.federation_id, with_for_update=LOCK)
        client = refuse_outdated(session, identity)  # the federation may have been deleted meanwhile
        _refuse_more_than_registered(client, result)
        if federation is None or session.get(Model, (federation.id, model_number)) is None:
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
            judge_last(session, federation, model_number)


def _refuse_more_than_registered(client: Client, result: Measured) -> None:
    """A site's share of the pooled accuracy is limited by what it has registered, which the operator can see."""
    registered = client.held_out_images
    limit = client_record(client).images if registered is None else registered
    if result.samples > limit:
        what = "training images, and no number of held-out images" if registered is None else "held-out images"
        raise InvalidInput(
            "too-many-samples",
            f"The evaluation is over {result.samples} images; this client has registered {limit} {what}.",
            next_step="Register the number with PATCH /v1/me (held_out_images); current agents do so when they start.",
        )
