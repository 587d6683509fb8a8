"""What a client should do now, and the tensors that it needs for it."""

import json

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from server.core.aggregation import first_nonfinite
from server.core.errors import Conflict, Gone, NotAllowed, NotFound
from server.core.rounds import describe
from server.service.context import (
    Context,
    client_record,
    dump_roster,
    facts_of,
    half_of,
    load_roster,
    update_spec,
)
from server.service.enrolment import Identity, refuse_outdated
from server.service.federations import load
from server.service.models import blob_of
from server.service.progress import active_clients, latest_model, round_under_way, upload_time_left, waiting_for
from server.service.shared_loads import SharedLoads
from server.service.tensors import load_tensors
from server.store import blobs
from server.store.session import Database
from server.store.tables import Blob, Client, Federation, Model, Participant, Personal, Round, Update
from shared.methods.base import ServerState, Tensors
from shared.schemas import ModelPointer, RoundTaskView, TaskAnswer
from shared.wire import encode

_private_states = SharedLoads(max_bytes=1 << 30)  # pFedHN's are as large as its hypernetwork, which can be gigabytes
SERVING = 0  # the round id of personal tensors that belong to no round


def task(ctx: Context, identity: Identity) -> TaskAnswer:
    """Train, wait, or go on serving; always with the newest model. Refused once the client's access has ended."""
    answer = _task(ctx, identity)
    parts = (answer.action, answer.round.id if answer.round else 0, answer.model.number if answer.model else 0)
    return answer.model_copy(update={"ticket": "-".join(map(str, parts))})


def _task(ctx: Context, identity: Identity) -> TaskAnswer:
    with ctx.db.read() as session:
        refuse_outdated(session, identity)
        federation = session.get_one(Federation, identity.federation_id)
        if federation.state == "cancelled":
            return TaskAnswer(action="cancelled", reason=federation.reason)
        round_ = round_under_way(session, federation)
        mine = _open_part(session, identity, round_)
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
        in_words = describe(waiting, ctx.clock()) if waiting else "the operator has not started it"
        return TaskAnswer(
            action=action,
            reason=federation.reason or in_words,
            model=pointer,
            personal_url=f"/v1/federations/{federation.name}/personal?model={pointer.number}",
            facts=facts_of(serving_basis(session, federation)[0]),
        )


def _open_part(session: Session, identity: Identity, round_: Round | None) -> Round | None:
    if round_ is None or round_.state != "open":
        return None
    chosen = session.get(Participant, (round_.id, identity.client_id))
    done = session.get(Update, (round_.id, identity.client_id))
    return round_ if chosen is not None and done is None else None


def _pointer(session: Session, federation: Federation, model: Model) -> ModelPointer:
    blob = session.get_one(Blob, blob_of(session, model))
    return ModelPointer(
        number=model.number,
        url=f"/v1/federations/{federation.name}/model?round={model.number}",
        digest=blob.digest or "",
        size_bytes=blob.size_bytes,
    )


def round_of(session: Session, identity: Identity, round_id: int) -> Round:
    """A round that this client takes part in."""
    round_ = session.get(Round, round_id)
    if round_ is None or round_.federation_id != identity.federation_id:
        raise NotFound("no-such-round", f"There is no round {round_id}.", next_step="GET /v1/task names the open one.")
    if session.get(Participant, (round_id, identity.client_id)) is None:
        raise NotAllowed("not-a-participant", f"This client was not chosen for round {round_.number}.")
    return round_


def round_model(ctx: Context, identity: Identity, round_id: int) -> Blob:
    """The global model that a round starts from."""
    with ctx.db.read() as session:
        round_ = round_of(session, identity, round_id)
        return _model_blob(session, round_.federation_id, round_.base_model)


def federation_model(ctx: Context, name: str, number: int | None) -> Blob:
    """A global model by its number, or the newest."""
    with ctx.db.read() as session:
        federation = load(session, name)
        wanted = latest_model(session, federation).number if number is None else number
        return _model_blob(session, federation.id, wanted)


def _model_blob(session: Session, federation_id: int, number: int) -> Blob:
    model = session.get(Model, (federation_id, number))
    if model is None:
        raise NotFound("no-such-model", f"There is no model {number}.", next_step="Rounds that failed made none.")
    return session.get_one(Blob, blob_of(session, model))


def round_personal(ctx: Context, identity: Identity, round_id: int) -> Blob:
    """The client's own tensors for a round; made when they are first asked for, then always the same."""
    with ctx.db.read() as session:
        round_ = round_of(session, identity, round_id)
        federation = session.get_one(Federation, round_.federation_id)
    return _personal(ctx, identity, federation, round_.base_model, round_.id, round_.facts, round_.roster)


def serving_personal(ctx: Context, identity: Identity, name: str, number: int) -> Blob:
    """The client's own tensors to serve the newest model with."""
    with ctx.db.read() as session:
        federation = load(session, name)
        facts, roster = serving_basis(session, federation)
    return _personal(ctx, identity, federation, number, SERVING, facts, roster)


def serving_basis(session: Session, federation: Federation) -> tuple[str, str]:
    """Facts and roster of the last round that made a model; before that, those of now."""
    query = select(Round).where(Round.federation_id == federation.id, Round.state == "done")
    last = session.execute(query.order_by(Round.number.desc()).limit(1)).scalar_one_or_none()
    if last is not None:
        return last.facts, last.roster
    roster = [client_record(client) for client in active_clients(session, federation)]
    facts = half_of(federation.plan).facts(roster) if roster else {}  # nobody's data have no heterogeneity
    return json.dumps(facts, sort_keys=True), dump_roster(roster)


def _personal(
    ctx: Context, identity: Identity, federation: Federation, number: int, round_id: int, facts: str, roster: str
) -> Blob:
    key = (federation.id, number, round_id, identity.client_id)
    with ctx.db.read() as session:
        stored = session.get(Personal, key)
        if stored is not None:
            return session.get_one(Blob, stored.blob_id)
        model = session.get(Model, (federation.id, number))
        newest = latest_model(session, federation).number
        client = client_record(session.get_one(Client, identity.client_id))
    if model is None or number > newest:
        raise NotFound("no-such-model", f"There is no model {number}.")
    if number < newest:
        raise Gone(
            "model-superseded",
            f"Model {number} has been followed by model {newest}.",
            next_step="GET /v1/task names the newest one.",
        )
    private = _private_state(ctx.db, model.private_blob_id) if model.private_blob_id else {}
    members = load_roster(roster)
    client = next((member for member in members if member.id == client.id), client)  # newer counts count later
    state = ServerState(shared={}, private=private)
    tensors = half_of(federation.plan).personal(state, client, members, facts_of(facts))
    if first_nonfinite(tensors) is not None:  # of an older release, or of a roster that has changed since
        raise Conflict(
            "not-finite",
            f"This client's tensors for model {number} are not finite numbers.",
            next_step="The operator can go back to an older model: distrans-server federation rollback.",
        )
    blob_id = blobs.store(ctx.db, encode(tensors, {"model": str(number)}))
    try:
        with ctx.db.write() as session:
            session.add(
                Personal(
                    federation_id=federation.id,
                    model_number=number,
                    round_id=round_id,
                    client_id=identity.client_id,
                    blob_id=blob_id,
                )
            )
    except IntegrityError:  # another request was first: its copy counts
        with ctx.db.write() as session:
            blobs.drop(session, blob_id)
            blob_id = session.get_one(Personal, key).blob_id
    with ctx.db.read() as session:
        return session.get_one(Blob, blob_id)


def _private_state(db: Database, blob_id: str) -> Tensors:
    with db.read() as session:
        blob = session.get(Blob, blob_id)

    def load() -> Tensors:
        # Copies lie where torch puts them, not as in the file: half_of's methods would else copy them for every client.
        return {name: value.clone() for name, value in load_tensors(db, blob_id).items()}

    return _private_states.get((db, blob_id), blob.size_bytes if blob else 0, load)
