"""What the coordinator asks of a federation's method: in this process, or with torch in another one if it must."""

import json
from collections.abc import Mapping

from sqlalchemy.orm import Session

from server.compute.calls import Held
from server.compute.torch_calls import torch_calls
from server.service.context import facts_of, plan_of, server_half_of
from server.service.retention import require_blob_id
from server.service.stored_tensors import StoredTensors, load_tensors, stored_spec
from server.store.database import Database
from server.store.tables import Federation, Model, Round
from shared.contract.class_totals import CLASS_TOTALS
from shared.learning.methods.base import (
    ClientRecord,
    Facts,
    PersonalUploads,
    RoundContext,
    ServerState,
    next_shared,
)
from shared.tensors.arrays import Array, Arrays
from shared.tensors.compression import compressed_spec
from shared.tensors.spec import Spec

_MAX_SPECS = 64
_specs: dict[tuple[str, str], Spec] = {}  # by plan and facts, on which alone they depend


def update_spec(session: Session, federation: Federation, round_: Round) -> Spec:
    """Return the spec of an upload in a round, from the header of the stored model if that tells it."""
    facts = {name: value for name, value in facts_of(round_.facts).items() if name != CLASS_TOTALS}
    key = (federation.plan, json.dumps(facts, sort_keys=True))
    found = _specs.get(key)
    if found is None:
        found = _stored_update_spec(session, federation, round_, facts)
        found = found or torch_calls().update_spec(federation.plan, facts)
        found = compressed_spec(found, plan_of(federation.plan).training.update_compression)
        if len(_specs) >= _MAX_SPECS:
            _specs.pop(next(iter(_specs)), None)
        _specs[key] = found
    return found


def _stored_update_spec(session: Session, federation: Federation, round_: Round, facts: Facts) -> Spec | None:
    half = server_half_of(federation.plan)
    if "update_spec" in half.torch_calls(facts):
        return None
    model = session.get_one(Model, (federation.id, round_.base_model))
    private = stored_spec(session, model.private_blob_id) if model.private_blob_id else Spec({})
    return half.stored_update_spec(stored_spec(session, require_blob_id(session, model)), private, facts)


def personal_tensors(
    db: Database, plan_json: str, private_id: str | None, client: ClientRecord, round_: RoundContext
) -> Mapping[str, Array]:
    """Return the personal tensors to send to a client, from a stored private state."""
    half = server_half_of(plan_json)
    if "personal" in half.torch_calls(round_.facts):
        return torch_calls().personal(plan_json, _held(db, private_id), client, round_)
    return half.personal(ServerState({}, _private(db, private_id)), client, round_)


def finish_round(
    db: Database,
    plan_json: str,
    base: Model,
    base_id: str,
    mean: Arrays,
    uploads: PersonalUploads,
    round_: RoundContext,
) -> ServerState:
    """Return the state after a round, from the stored one before it and the mean of the updates."""
    half, shared, private_id = server_half_of(plan_json), StoredTensors(db, base_id), base.private_blob_id
    if "next_private" in half.torch_calls(round_.facts):
        private = torch_calls().next_private(plan_json, _held(db, private_id), uploads, round_)
        return ServerState(next_shared(shared, mean), private)
    return half.finish(ServerState(shared, _private(db, private_id)), mean, uploads, round_)


def _private(db: Database, private_id: str | None) -> Mapping[str, Array]:
    return StoredTensors(db, private_id) if private_id else {}


def _held(db: Database, private_id: str | None) -> Held:
    return Held(private_id, lambda: load_tensors(db, private_id)) if private_id else Held("", dict)
