"""What a client should do now."""

from sqlalchemy.orm import Session

from server.core.lifecycle import describe_waiting
from server.service.client_tokens import require_current_client
from server.service.context import Context, Identity, facts_of, update_spec
from server.service.queries import latest_model, round_under_way, serving_context
from server.service.retention import require_blob_id
from server.service.transitions import upload_time_left, waiting_for
from server.store.tables import Blob, Federation, Model, Participant, Round, Update
from shared.contract.messages import ModelPointer, RoundTaskView, TaskAnswer


def task(ctx: Context, identity: Identity) -> TaskAnswer:
    """Return whether to train, wait, or keep serving, and the newest model; raise if the client's access has ended."""
    answer = _task(ctx, identity)
    parts = (answer.action, answer.round.id if answer.round else 0, answer.model.number if answer.model else 0)
    return answer.model_copy(update={"ticket": "-".join(map(str, parts))})


def _task(ctx: Context, identity: Identity) -> TaskAnswer:
    with ctx.db.read() as session:
        require_current_client(session, identity)
        federation = session.get_one(Federation, identity.federation_id)
        if federation.state == "cancelled":
            return TaskAnswer(action="cancelled", reason=federation.reason)
        round_ = round_under_way(session, federation)
        mine = _pending_round(session, identity, round_)
        pointer = _pointer(session, federation, latest_model(session, federation))
        if mine is not None and federation.state == "running":
            facts = facts_of(mine.facts)
            return TaskAnswer(
                action="train",
                round=RoundTaskView(
                    id=mine.id,
                    number=mine.number,
                    facts=facts,
                    update_url=f"/v1/rounds/{mine.id}/update",
                    max_update_bytes=update_spec(federation.plan, mine.facts).max_total_bytes,
                ),
                model=pointer,
                personal_url=f"/v1/rounds/{mine.id}/personal",
                facts=facts,
                deadline_s=upload_time_left(session, federation, mine),
            )
        action = {"finished": "finished", "paused": "paused"}.get(federation.state, "wait")
        waiting = waiting_for(session, ctx, federation)
        status = describe_waiting(waiting, ctx.clock()) if waiting else "the operator has not started it"
        return TaskAnswer(
            action=action,
            reason=federation.reason or status,
            model=pointer,
            personal_url=f"/v1/federations/{federation.name}/personal?model={pointer.number}",
            facts=serving_context(session, federation).facts,
        )


def _pending_round(session: Session, identity: Identity, round_: Round | None) -> Round | None:
    if round_ is None or round_.state != "open":
        return None
    chosen = session.get(Participant, (round_.id, identity.client_id))
    done = session.get(Update, (round_.id, identity.client_id))
    return round_ if chosen is not None and done is None else None


def _pointer(session: Session, federation: Federation, model: Model) -> ModelPointer:
    blob = session.get_one(Blob, require_blob_id(session, model))
    return ModelPointer(
        number=model.number,
        url=f"/v1/federations/{federation.name}/model?round={model.number}",
        digest=blob.digest or "",
        size_bytes=blob.size_bytes,
    )
