"""Which models and server states are kept, and which may be deleted."""

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from server.core.errors import Gone, short_list
from server.service.context import Context
from server.store import blobs
from server.store.database import LOCK
from server.store.tables import Federation, Model

_DROPPED_AT_ONCE = 10  # models per transaction: a few statements each, their chunks follow later
KEPT_STATES = 5  # newest models per federation whose private server state is kept


@dataclass(frozen=True)
class Retention:
    """How long data is kept after it was last needed."""

    keep_round_uploads: int = 1  # newest finished rounds per federation whose uploads stay
    resumable_s: float = 24 * 3600.0  # an interrupted resumable upload
    torn_s: float = 600.0  # an interrupted PUT whose process died
    garbage_s: float = 3600.0  # an unreferenced blob
    keep_models: int = 0  # newest models per federation that stay, besides the first and the best (0 = all)


def drop_old_states(session: Session, federation: Federation) -> None:
    """Delete all but the newest few private server states, which can be several times as large as a model."""
    query = select(Model).where(Model.federation_id == federation.id, Model.private_blob_id.is_not(None))
    for model in session.execute(query.order_by(Model.number.desc()).offset(KEPT_STATES)).scalars().all():
        blob_id, model.private_blob_id, model.private_dropped = model.private_blob_id, None, True
        blobs.remove_in(session, str(blob_id))  # no-op if a rolled-back model shares it


def require_blob_id(session: Session, model: Model) -> str:
    """Return the model's blob id; raise Gone, listing the models still kept, if its bytes were deleted."""
    if model.blob_id is None:
        query = select(Model.number).where(Model.federation_id == model.federation_id, Model.blob_id.is_not(None))
        kept = session.execute(query.order_by(Model.number)).scalars().all()
        raise model_dropped(model.number, f"Still available: {short_list(kept, 20, last=True)}.")
    return model.blob_id


def model_dropped(number: int, next_step: str) -> Gone:
    """Return the error for a model whose bytes were deleted."""
    return Gone("model-dropped", f"Model {number} was deleted; its history remains.", next_step=next_step)


def droppable(session: Session, federation: Federation, keep: int) -> list[Model]:
    """Return the models whose bytes are no longer needed, oldest first.

    These are all but the newest `keep`, the first and the best one. The newest two always stay, because agents may
    still be downloading the one before the last. A model that shares its bytes with a kept one after a rollback stays
    too: dropping it would free nothing.
    """
    query = select(Model).where(Model.federation_id == federation.id, Model.blob_id.is_not(None))
    models = session.execute(query.order_by(Model.number)).scalars().all()
    kept = {model.number for model in (*models[:1], *models[-max(keep, 2) :])} | {federation.best_model}
    in_use = {model.blob_id for model in models if model.number in kept}
    return [model for model in models if model.blob_id not in in_use]


def drop_old_models(ctx: Context, federation_id: int, keep: int) -> int:
    """Delete the bytes of some models no longer needed, in a short transaction; return 0 when none are left."""
    with ctx.db.write() as session:
        federation = session.get(Federation, federation_id, with_for_update=LOCK)  # a rollback may be running
        found = droppable(session, federation, keep) if federation is not None else []
        chosen = list(dict.fromkeys(model.blob_id for model in found))[:_DROPPED_AT_ONCE]
        for model in [model for model in found if model.blob_id in chosen]:
            blob_ids = model.blob_id, model.private_blob_id
            model.blob_id, model.private_blob_id = None, None
            model.private_dropped = model.private_dropped or blob_ids[1] is not None
            for blob_id in filter(None, blob_ids):
                blobs.remove_in(session, blob_id)
        return len(chosen)
