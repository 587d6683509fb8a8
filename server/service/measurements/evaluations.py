"""Stores what clients measure with a global model on their held-out data."""

from server.core.errors import InvalidInput, NotFound
from server.service.best_model import consider_last_model
from server.service.client_tokens import require_current_client
from server.service.context import Context, Identity, client_record
from server.store.database import LOCK
from server.store.tables import Client, Evaluation, Federation, Model
from shared.contract.limits import MAX_LOSS
from shared.contract.measurements import EvaluationReport


def submit(ctx: Context, identity: Identity, model_number: int, result: EvaluationReport) -> None:
    """Store a client's measurement, replacing an earlier one of the same model."""
    if not result.negatives_correct <= result.correct <= result.samples or not (
        result.negatives_as_own + result.negatives_correct <= result.negatives <= result.samples
    ):
        raise InvalidInput("inconsistent-evaluation", "The counts of the evaluation are inconsistent.")
    if result.loss_sum > MAX_LOSS * result.samples:
        raise InvalidInput(
            "absurd-loss", f"The loss_sum of {result.loss_sum:.3g} exceeds {MAX_LOSS:.0e} per held-out image."
        )
    with ctx.db.write() as session:
        federation = session.get(Federation, identity.federation_id, with_for_update=LOCK)
        client = require_current_client(session, identity)  # the federation may just have been deleted
        _require_registered(client, result)
        if federation is None or session.get(Model, (federation.id, model_number)) is None:
            raise NotFound("no-such-model", f"There is no model {model_number}.")
        session.merge(
            Evaluation(
                federation_id=federation.id,
                model_number=model_number,
                client_id=identity.client_id,
                result=result.model_dump_json(exclude_none=True),
                received_at=ctx.clock(),
            )
        )
        session.flush()
        # In a running federation the next round considers this model; the last model has no next round.
        if federation.state == "finished":
            consider_last_model(session, federation, model_number)


def _require_registered(client: Client, result: EvaluationReport) -> None:
    """Raise if the client claims more images than it registered, a number that the operator can see."""
    registered = client.held_out_images
    limit = client_record(client).images if registered is None else registered
    covered = max(result.samples, result.paired.samples if result.paired else 0)
    if covered > limit:
        what = "training images and no held-out images" if registered is None else "held-out images"
        raise InvalidInput(
            "too-many-samples",
            f"The evaluation covers {covered} images, but this client registered {limit} {what}.",
            next_step="Register the number with PATCH /v1/me (held_out_images); current agents do so at startup.",
        )
