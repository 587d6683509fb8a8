"""Going back to an older model."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from server.core.errors import Conflict, short_list
from server.service.audit import record_action
from server.service.best_model import recompute_best_model
from server.service.context import Actor, Context, notify_agents
from server.service.queries import latest_model, load_federation, next_number, round_under_way
from server.service.retention import model_dropped
from server.service.transitions import pause_clock
from server.store.tables import Client, Federation, Model, Round


def roll_back(ctx: Context, actor: Actor, name: str, to: int) -> None:
    """Publish an older model again under the next number, and pause the federation.

    Nothing is removed: the rounds in between stay in the history, the one under way fails, and agents see a new model.
    The number of completed rounds and the best accuracy return to what they were at that model.
    """
    with ctx.db.write() as session:
        federation = load_federation(session, name, lock=True)
        if federation.state == "cancelled":
            raise Conflict("wrong-state", f"Federation {name!r} was cancelled and can no longer be rolled back.")
        target, number = _target(session, federation, to), next_number(session, federation)
        reason, now = f"rolled back to model {to}", ctx.clock()
        under_way = round_under_way(session, federation)
        if under_way is not None:
            under_way.state, under_way.reason, under_way.closed_at = "failed", reason, now
        source = _source_round(session, federation, to)
        session.add_all(
            [
                Model(
                    federation_id=federation.id,
                    number=number,
                    blob_id=target.blob_id,
                    private_blob_id=target.private_blob_id,
                    rounds_done=target.rounds_done,
                    created_at=now,
                ),
                Round(
                    federation_id=federation.id,
                    number=number,
                    base_model=to,
                    state="done",
                    reason=reason,
                    facts=source.facts,
                    roster=source.roster,
                    opened_at=now,
                    closed_at=now,
                ),
            ]
        )
        session.flush()
        gone = select(Client).where(Client.federation_id == federation.id, Client.state != "active", Client.counted)
        for client in session.execute(gone).scalars():  # they left after an end that is now undone
            client.counted = False
        session.flush()
        recompute_best_model(session, federation, to)
        federation.completed_rounds = target.rounds_done
        if federation.state != "paused":
            federation.state, federation.state_since = "paused", now
        federation.reason, federation.reason_detail = reason, ""
        pause_clock(session, federation)
        notify_agents(federation)
        record_action(session, ctx, actor, "federation.rollback", name, to=to, model=number)


def _target(session: Session, federation: Federation, number: int) -> Model:
    newest = latest_model(session, federation).number
    query = select(Model).where(Model.federation_id == federation.id, Model.number < newest)
    older = {model.number: model for model in session.execute(query.order_by(Model.number)).scalars()}
    possible = [model.number for model in older.values() if model.blob_id is not None and not model.private_dropped]
    if number in possible:
        return older[number]
    choices = f"Choose one of: {short_list(possible, 20, last=True)}."
    next_step = choices if possible else "There is no older model to go back to."
    if number in older and older[number].blob_id is None:
        raise model_dropped(number, next_step)
    if number == newest:
        cause = f"Model {number} is already the newest one."
    elif number in older:
        cause = f"The server state of model {number} is no longer kept."
    else:
        cause = f"Federation {federation.name!r} has no model {number}."
    raise Conflict("no-rollback", cause, next_step=next_step)


def _source_round(session: Session, federation: Federation, number: int) -> Round:
    """Return the round that produced a model; for θ⁰ and an imported model, the first completed one after it."""
    query = select(Round).where(Round.federation_id == federation.id, Round.state == "done", Round.number >= number)
    return session.execute(query.order_by(Round.number).limit(1)).scalar_one()
