"""Tensors a client downloads: global models, and its own personal tensors."""

from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from server.core.errors import Conflict, Gone, NotFound
from server.core.folding import first_nonfinite
from server.service.context import Context, Identity, client_record, round_context
from server.service.method_calls import personal_tensors
from server.service.queries import latest_model, load_federation, round_of, serving_context
from server.service.retention import require_blob_id
from server.store import blobs
from server.store.tables import Blob, Client, Federation, Model, Personal
from shared.learning.methods.base import RoundContext
from shared.tensors.wire import encode

SERVING = 0  # round id of personal tensors that belong to no round


def federation_model(ctx: Context, name: str, number: int | None) -> Blob:
    """Return a global model by its number, or the newest."""
    with ctx.db.read() as session:
        federation = load_federation(session, name)
        wanted = latest_model(session, federation).number if number is None else number
        return _model_blob(session, federation.id, wanted)


def _model_blob(session: Session, federation_id: int, number: int) -> Blob:
    model = session.get(Model, (federation_id, number))
    if model is None:
        raise NotFound("no-such-model", f"There is no model {number}.", next_step="Failed rounds produce no model.")
    return session.get_one(Blob, require_blob_id(session, model))


def round_personal(ctx: Context, identity: Identity, round_id: int) -> Blob | bytes:
    """Return the client's personal tensors for a round; computed at the first request, then always the same."""
    with ctx.db.read() as session:
        round_ = round_of(session, identity, round_id)
        federation = session.get_one(Federation, round_.federation_id)
    return _personal(ctx, identity, federation, (round_.base_model, round_.id), round_context(round_))


def serving_personal(ctx: Context, identity: Identity, name: str, number: int) -> Blob | bytes:
    """Return the client's personal tensors for serving the newest model."""
    with ctx.db.read() as session:
        federation = load_federation(session, name)
        context = serving_context(session, federation)
    return _personal(ctx, identity, federation, (number, SERVING), context)


def _personal(
    ctx: Context, identity: Identity, federation: Federation, use: tuple[int, int], context: RoundContext
) -> Blob | bytes:
    """Return the tensors for one use: the numbers of a model and of a round (or SERVING). No tensors are not stored."""
    key = (federation.id, *use, identity.client_id)
    with ctx.db.read() as session:
        stored = session.get(Personal, key)
        if stored is not None:
            return session.get_one(Blob, stored.blob_id)
        private_id = _require_newest(session, federation, use[0]).private_blob_id
        client = client_record(session.get_one(Client, identity.client_id))
    client = next((member for member in context.roster if member.id == client.id), client)  # not newer counts
    tensors = personal_tensors(ctx.db, federation.plan, private_id, client, context)
    if first_nonfinite(tensors) is not None:  # from an older release, or the roster has changed since
        raise Conflict(
            "not-finite",
            f"This client's tensors for model {use[0]} are not finite.",
            next_step="The operator can go back to an older model: distrans-server federation rollback.",
        )
    body = encode(tensors, {"model": str(use[0])})
    if not tensors:
        return body
    blob_id = blobs.store(ctx.db, body)
    try:
        with ctx.db.write() as session:
            session.add(
                Personal(
                    federation_id=federation.id,
                    model_number=use[0],
                    round_id=use[1],
                    client_id=identity.client_id,
                    blob_id=blob_id,
                )
            )
    except IntegrityError:  # another request got there first: use its copy
        with ctx.db.write() as session:
            blobs.remove_in(session, blob_id)
            blob_id = session.get_one(Personal, key).blob_id
    with ctx.db.read() as session:
        return session.get_one(Blob, blob_id)


def _require_newest(session: Session, federation: Federation, number: int) -> Model:
    newest = latest_model(session, federation)
    model = session.get(Model, (federation.id, number))
    if model is None or number > newest.number:
        raise NotFound("no-such-model", f"There is no model {number}.")
    if number < newest.number:
        raise Gone(
            "model-superseded",
            f"Model {number} has been superseded by model {newest.number}.",
            next_step="GET /v1/task returns the newest one.",
        )
    return newest
