"""The calls that need torch, as functions of plain data, for whichever process runs them.

They are pure: a call that is repeated in another process, because the first one died, gives the same bits.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from server.compute.initial_weights import load_pretrained
from shared.contract.plan import FederationPlan, read_stored_plan
from shared.learning.methods import server_half
from shared.learning.methods.base import ClientRecord, PersonalUploads, RoundContext, ServerHalf, ServerState
from shared.tensors.arrays import Array
from shared.tensors.spec import Entry, Spec

_Json = Any


@dataclass(frozen=True)
class Held:
    """Tensors that a process keeps until it is given others, so that they are sent once for many calls."""

    key: str
    load: Callable[[], Mapping[str, Array]]


@dataclass(frozen=True)
class Request:
    """One call: its arguments as JSON, and its tensors. A call that is repeated iterates over `uploads` again."""

    call: str
    arguments: Mapping[str, _Json]
    held: Held | None = None
    uploads: Iterable[tuple[ClientRecord, Mapping[str, Array]]] = ()


@dataclass(frozen=True)
class Reply:
    """What a call returns: JSON, and sets of tensors."""

    result: _Json = None
    sets: list[Mapping[str, Array]] = field(default_factory=list)


def run(call: str, arguments: Mapping[str, _Json], held: Mapping[str, Array], uploads: PersonalUploads) -> Reply:
    """Run a call in this process."""
    return _CALLS[call](arguments, held, uploads)


def dump_round(round_: RoundContext) -> _Json:
    """Return a round's context as JSON."""
    return {"facts": dict(round_.facts), "roster": [dump_client(client) for client in round_.roster]}


def dump_client(client: ClientRecord) -> _Json:
    """Return a client's record as JSON."""
    return [client.id, list(client.class_counts)]


def read_client(found: _Json) -> ClientRecord:
    """Reverse `dump_client`."""
    return ClientRecord(found[0], tuple(found[1]))


def dump_spec(spec: Spec) -> _Json:
    """Return the entries of a spec as JSON."""
    return {name: [entry.wire_name, *entry.shape] for name, entry in spec.entries.items()}


def read_spec(found: _Json) -> Spec:
    """Reverse `dump_spec`."""
    return Spec({name: Entry(tuple(shape), wire_name) for name, (wire_name, *shape) in found.items()})


@lru_cache(maxsize=4)
def _plan_and_half(plan_json: str) -> tuple[FederationPlan, ServerHalf]:
    plan = read_stored_plan(plan_json)
    return plan, server_half(plan)


def _initial_state(arguments: Mapping[str, _Json], _held: Mapping[str, Array], _uploads: PersonalUploads) -> Reply:
    plan, half = _plan_and_half(arguments["plan"])
    file = arguments["weights"]
    state = half.initial_state(load_pretrained(plan, None if file is None else Path(file)))
    return Reply(sets=[state.shared, state.private])


def _update_spec(arguments: Mapping[str, _Json], _held: Mapping[str, Array], _uploads: PersonalUploads) -> Reply:
    _, half = _plan_and_half(arguments["plan"])
    return Reply(dump_spec(half.update_spec(arguments["facts"])))


def _model_spec(arguments: Mapping[str, _Json], _held: Mapping[str, Array], _uploads: PersonalUploads) -> Reply:
    _, half = _plan_and_half(arguments["plan"])
    return Reply(dump_spec(half.model_spec()))


def _private_spec(arguments: Mapping[str, _Json], _held: Mapping[str, Array], _uploads: PersonalUploads) -> Reply:
    _, half = _plan_and_half(arguments["plan"])
    return Reply(dump_spec(half.private_spec(read_spec(arguments["found"]))))


def _personal(arguments: Mapping[str, _Json], held: Mapping[str, Array], _uploads: PersonalUploads) -> Reply:
    _, half = _plan_and_half(arguments["plan"])
    client = read_client(arguments["client"])
    return Reply(sets=[half.personal(ServerState({}, held), client, _read_round(arguments["round"]))])


def _next_private(arguments: Mapping[str, _Json], held: Mapping[str, Array], uploads: PersonalUploads) -> Reply:
    _, half = _plan_and_half(arguments["plan"])
    return Reply(sets=[half.next_private(held, uploads, _read_round(arguments["round"]))])


def _read_round(found: _Json) -> RoundContext:
    return RoundContext([read_client(client) for client in found["roster"]], dict(found["facts"]))


_CALLS: dict[str, Callable[[Mapping[str, _Json], Mapping[str, Array], PersonalUploads], Reply]] = {
    "initial_state": _initial_state,
    "update_spec": _update_spec,
    "model_spec": _model_spec,
    "private_spec": _private_spec,
    "personal": _personal,
    "next_private": _next_private,
}
