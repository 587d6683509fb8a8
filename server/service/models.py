"""Global models: which of them, and of their server states, are kept; which is best; rolling back to an older one."""

from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from server.core.errors import Conflict, Gone
from server.service.context import Actor, Context, record
from server.service.federations import load
from server.service.history import pooled, pooled_accuracies, pooled_accuracy
from server.service.progress import base_of, hold, latest_model, round_under_way
from server.store import blobs
from server.store.session import LOCK
from server.store.tables import Client, Federation, Model, Round

_DROPPED_AT_ONCE = 10  # models; each is a few statements, its chunks follow later
KEPT_STATES = 5  # the newest models of each federation whose private server state is kept


def drop_old_states(session: Session, federation: Federation) -> None:
    """Keep the private state of the newest few models; it may be several times as large as a model."""
    query = select(Model).where(Model.federation_id == federation.id, Model.private_blob_id.is_not(None))
    for model in session.execute(query.order_by(Model.number.desc()).offset(KEPT_STATES)).scalars().all():
        blob_id, model.private_blob_id, model.private_dropped = model.private_blob_id, None, True
        blobs.drop(session, str(blob_id))  # unless a model that was rolled back to shares it


def blob_of(session: Session, model: Model) -> str:
    """The blob of a model whose bytes are kept; Gone, with those that are, when they were dropped."""
    if model.blob_id is None:
        query = select(Model.number).where(Model.federation_id == model.federation_id, Model.blob_id.is_not(None))
        raise Gone(
            "model-dropped",
            f"Model {model.number} is no longer kept; its history is.",
            next_step=f"These are kept: {_listed(session.execute(query.order_by(Model.number)).scalars().all())}.",
        )
    return model.blob_id


def _listed(numbers: Sequence[int]) -> str:
    return ("… " if len(numbers) > 20 else "") + ", ".join(map(str, numbers[-20:]))


def droppable(session: Session, federation: Federation, keep: int) -> list[Model]:
    """The models whose bytes are no longer needed, oldest first.

    All but the newest `keep`, the first and the best one; the newest two always stay, because agents may still be
    fetching the one before. A model that shares its bytes with one of these, because it was rolled back to, stays as
    well: dropping it would free nothing.
    """
    query = select(Model).where(Model.federation_id == federation.id, Model.blob_id.is_not(None))
    models = session.execute(query.order_by(Model.number)).scalars().all()
    kept = {model.number for model in (*models[:1], *models[-max(keep, 2) :])} | {federation.best_model}
    in_use = {model.blob_id for model in models if model.number in kept}
    return [model for model in models if model.blob_id not in in_use]


def drop_old_models(ctx: Context, federation_id: int, keep: int) -> int:
    """Drop the bytes of some models that are no longer needed, in a short transaction; 0 when none are left."""
    with ctx.db.write() as session:
        federation = session.get(Federation, federation_id, with_for_update=LOCK)  # a rollback may be under way
        found = droppable(session, federation, keep) if federation is not None else []
        chosen = list(dict.fromkeys(model.blob_id for model in found))[:_DROPPED_AT_ONCE]
        for model in [model for model in found if model.blob_id in chosen]:
            blob_ids = model.blob_id, model.private_blob_id
            model.blob_id, model.private_blob_id = None, None
            model.private_dropped = model.private_dropped or blob_ids[1] is not None
            for blob_id in filter(None, blob_ids):
                blobs.drop(session, blob_id)
        return len(chosen)


def judge_last(session: Session, federation: Federation, model_number: int) -> None:
    """Take the last model of a finished federation into account; no later round does.

    Only once it was tested on as many images as the model before it: a few sites alone may be the easy ones.
    """
    before = base_of(session, federation, model_number)
    found = pooled(session, federation, model_number)
    wanted = 0 if before is None else pooled(session, federation, before).samples
    if found.accuracy is None or found.samples < wanted:
        return
    if federation.best_accuracy is None or found.accuracy > federation.best_accuracy:
        federation.best_accuracy, federation.best_model = found.accuracy, model_number


def forget_measurements(session: Session, federation: Federation, *clients: Client) -> None:
    """The measurements of these clients no longer count: the best model is chosen anew without them.

    Accuracies over different clients cannot be compared, so that an older model would stay the best one for good.
    """
    for client in clients:
        client.counted = False
    session.flush()
    newest = latest_model(session, federation).number
    base = base_of(session, federation, newest)
    if base is not None:  # the newest one has not been judged yet
        _recall(session, federation, base)
    if federation.state == "finished":
        judge_last(session, federation, newest)


def note_accuracy(session: Session, federation: Federation, model_number: int) -> None:
    """Remember the best model that the clients have measured, and how many rounds ago that was."""
    accuracy = pooled_accuracy(session, federation, model_number)
    _note(federation, model_number, accuracy, is_copy=_is_copy(session, federation, model_number))


def _note(federation: Federation, number: int, accuracy: float | None, *, is_copy: bool) -> None:
    if accuracy is None:
        return
    if federation.best_accuracy is None or accuracy > federation.best_accuracy:
        federation.best_accuracy, federation.best_model, federation.stale_rounds = accuracy, number, 0
    elif not is_copy:
        federation.stale_rounds += 1


def _is_copy(session: Session, federation: Federation, number: int) -> bool:
    """Whether a model was published by a rollback, so that its accuracy has counted before."""
    base = base_of(session, federation, number)
    query = select(Model.rounds_done).where(Model.federation_id == federation.id, Model.number.in_([number, base]))
    return base is not None and len(set(session.execute(query).scalars())) == 1


def roll_back(ctx: Context, actor: Actor, name: str, to: int) -> None:
    """Publish an older model again, under the next number, and pause.

    Nothing is removed: the rounds in between stay in the history, the one under way fails, and agents see a new model.
    Rounds done and the best accuracy are again what they were at that model.
    """
    with ctx.db.write() as session:
        federation = load(session, name, lock=True)
        if federation.state == "cancelled":
            raise Conflict("wrong-state", f"Federation {name!r} was cancelled and can no longer be rolled back.")
        target, newest = _target(session, federation, to), latest_model(session, federation)
        reason, now = f"rolled back to model {to}", ctx.clock()
        under_way = round_under_way(session, federation)
        if under_way is not None:
            under_way.state, under_way.reason, under_way.closed_at = "failed", reason, now
        number = max(newest.number, _last_round(session, federation)) + 1
        basis = _basis(session, federation, to)
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
                    facts=basis.facts,
                    roster=basis.roster,
                    opened_at=now,
                    closed_at=now,
                ),
            ]
        )
        session.flush()
        gone = select(Client).where(Client.federation_id == federation.id, Client.state != "active", Client.counted)
        for client in session.execute(gone).scalars():  # they left after the end, which was not the end
            client.counted = False
        session.flush()
        _recall(session, federation, to)
        federation.completed_rounds = target.rounds_done
        if federation.state != "paused":
            federation.state, federation.state_since = "paused", now
        federation.reason, federation.reason_detail = reason, ""
        hold(session, federation)
        ctx.touch(federation)
        record(session, ctx, actor, "federation.rollback", name, to=to, model=number)


def _target(session: Session, federation: Federation, number: int) -> Model:
    newest = latest_model(session, federation).number
    query = select(Model).where(Model.federation_id == federation.id, Model.number < newest)
    older = {model.number: model for model in session.execute(query.order_by(Model.number)).scalars()}
    possible = [model.number for model in older.values() if model.blob_id is not None and not model.private_dropped]
    if number in possible:
        return older[number]
    next_step = f"Choose one of: {_listed(possible)}." if possible else "There is no older model to go back to."
    if number in older and older[number].blob_id is None:
        raise Gone("model-dropped", f"Model {number} is no longer kept; its history is.", next_step=next_step)
    if number == newest:
        cause = f"Model {number} is the newest one already."
    elif number in older:
        cause = f"The server state that belongs to model {number} is no longer kept."
    else:
        cause = f"Federation {federation.name!r} has no model {number}."
    raise Conflict("no-rollback", cause, next_step=next_step)


def _last_round(session: Session, federation: Federation) -> int:
    return session.execute(select(func.max(Round.number)).where(Round.federation_id == federation.id)).scalar() or 0


def _basis(session: Session, federation: Federation, number: int) -> Round:
    """The round that made a model; for θ⁰ and an imported model, which none made, the first one after it."""
    query = select(Round).where(Round.federation_id == federation.id, Round.state == "done", Round.number >= number)
    return session.execute(query.order_by(Round.number).limit(1)).scalar_one()


def _recall(session: Session, federation: Federation, number: int) -> None:
    """The best accuracy as it follows from a model and those that it came from."""
    rounds = select(Round.number, Round.base_model).where(Round.federation_id == federation.id, Round.state == "done")
    bases = {row.number: row.base_model for row in session.execute(rounds)}
    line = [number]
    while line[-1] in bases:
        line.append(bases[line[-1]])
    if federation.best_model is None or federation.best_model >= min(line):  # else it is from before an import
        federation.best_accuracy = federation.best_model = None
    federation.stale_rounds = 0
    models = select(Model.number, Model.rounds_done).where(Model.federation_id == federation.id)
    rounds_done = {row.number: row.rounds_done for row in session.execute(models)}
    accuracies = pooled_accuracies(session, federation)
    for ancestor in reversed(line):
        is_copy = ancestor in bases and rounds_done.get(ancestor) == rounds_done.get(bases[ancestor])
        _note(federation, ancestor, accuracies.get(ancestor), is_copy=is_copy)
