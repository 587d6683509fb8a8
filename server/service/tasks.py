"""What a client should do now.

Thousands of agents ask, often all at once. One statement therefore reads everything that may differ between them or
from moment to moment. The rest is the same for all clients of a federation and cached until its version grows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from server.core.errors import CoordinatorError, NotAllowed, NotAuthenticated
from server.core.lifecycle import UNDER_WAY, Waiting, describe_waiting
from server.service.client_tokens import deleted_federation, require_current
from server.service.context import Context, Identity, facts_of, plan_of
from server.service.method_calls import update_spec
from server.service.queries import latest_model, serving_context
from server.service.retention import require_blob_id
from server.service.transitions import waiting_for
from server.store.tables import Blob, Client, CoordinatorClock, Federation, Participant, Round, Update
from shared.contract.messages import ModelPointer, RoundTaskView, TaskAnswer
from shared.learning.methods.base import Facts

# What others wait for may be this much out of date: heartbeats and uptime are written no more often.
_FRESH_S = 2.0
_PER_STATEMENT = 500  # clients


class _Standing(NamedTuple):
    """How a client and its federation stand right now."""

    client_state: str
    token_generation: int
    created_at: float  # of the federation: a database may assign the id of a deleted one again
    version: int
    state: str
    reason: str
    due_uptime: float | None
    round_id: int | None  # under way
    round_state: str | None
    clock_started: bool | None
    chosen: str | None
    uploaded: str | None
    uptime: float

    @property
    def has_work(self) -> bool:
        """Whether the client has yet to upload an update for the open round."""
        is_open = self.state == "running" and self.round_state == "open"
        return is_open and self.chosen is not None and self.uploaded is None

    @property
    def situation(self) -> tuple[object, ...]:
        """What decides about everything that a client is told."""
        return self.has_work, self.stage, self.phase, self.state, self.reason, self.uptime

    @property
    def stage(self) -> tuple[object, ...]:
        """What decides about everything that all clients are told, but for the passing of time."""
        return self.created_at, self.version, self.round_id

    @property
    def phase(self) -> tuple[object, ...]:
        """What else decides what the federation is waiting for, as far as it is known here."""
        is_overdue = self.due_uptime is not None and self.uptime >= self.due_uptime
        return self.round_state, self.clock_started, self.due_uptime, is_overdue


class _Work(NamedTuple):
    """What all participants of a round are handed."""

    round: RoundTaskView
    model: ModelPointer
    allowance_s: float  # to upload, before the deadline starts to run


class _Pause(NamedTuple):
    """What all clients without work are told."""

    federation: str
    model: ModelPointer
    facts: Facts
    waiting: Waiting | None


_STANDINGS = (
    select(
        Client.id,
        Client.state,
        Client.token_generation,
        Federation.created_at,
        Federation.version,
        Federation.state,
        Federation.reason,
        Federation.due_uptime,
        Round.id,
        Round.state,
        Round.clock_started,
        Participant.client_id,
        Update.client_id,
        select(CoordinatorClock.uptime).scalar_subquery(),
    )
    .join(Federation, Federation.id == Client.federation_id)
    .outerjoin(
        Round,
        # Literals, because both databases use the index on these states only if they see them in the statement.
        (Round.federation_id == Federation.id)
        & Round.state.in_(bindparam("under_way", UNDER_WAY, expanding=True, literal_execute=True)),
    )
    .outerjoin(Participant, (Participant.round_id == Round.id) & (Participant.client_id == Client.id))
    .outerjoin(Update, (Update.round_id == Round.id) & (Update.client_id == Client.id))
    .where(Federation.deleted_at.is_(None))
)
_OF_ONE = _STANDINGS.where(Client.id == bindparam("client_id"))
_OF_MANY = _STANDINGS.where(Client.id.in_(bindparam("client_ids", expanding=True)))


@dataclass(frozen=True)
class Told:
    """What clients are told. Those that are told the same share one of these."""

    answer: TaskAnswer

    @cached_property
    def body(self) -> bytes:
        """The answer as JSON."""
        return self.answer.model_dump_json().encode()


Refusal = NotAllowed | NotAuthenticated


def task(ctx: Context, identity: Identity) -> TaskAnswer:
    """Return whether to train, wait, or keep serving, and the newest model; raise if the client's access has ended."""
    [answer] = answers(ctx, [identity])
    if isinstance(answer, CoordinatorError):
        raise answer
    return answer.answer


def answers(ctx: Context, identities: Sequence[Identity]) -> list[Told | Refusal]:
    """Return the task of each of these clients, or why its access has ended."""
    found: dict[str, _Standing] = {}
    with ctx.db.read() as session:
        for first in range(0, len(identities), _PER_STATEMENT):
            client_ids = [identity.client_id for identity in identities[first : first + _PER_STATEMENT]]
            rows = session.execute(_OF_MANY, {"client_ids": client_ids})
            found |= {client_id: _Standing(*rest) for client_id, *rest in rows}
        told: dict[tuple[object, ...], Told] = {}  # clients in the same situation are told the same
        return [_tell(ctx, session, one, found.get(one.client_id), told) for one in identities]


def answer_at_once(ctx: Context, identity: Identity) -> Told | None:
    """Return a client's task in the event loop, or None if that takes more than one short read.

    Raise if the client's access has ended.
    """
    rows = ctx.db.quick.rows(_OF_ONE, {"client_id": identity.client_id})
    if rows is None:
        return None
    standing = _require_access(_Standing(*rows[0][1:]) if rows else None, identity)
    shared = ctx.answers.peek(*_shared(ctx, identity.federation_id, standing))
    return None if shared is None else _compose(ctx, standing, shared)


def _require_access(standing: _Standing | None, identity: Identity) -> _Standing:
    """Return the standing; raise if the client's access has ended."""
    if standing is None:
        raise deleted_federation()
    require_current(standing.client_state, standing.token_generation, identity)
    return standing


def _tell(
    ctx: Context,
    session: Session,
    identity: Identity,
    found: _Standing | None,
    told: dict[tuple[object, ...], Told],
) -> Told | Refusal:
    try:
        standing = _require_access(found, identity)
    except (NotAllowed, NotAuthenticated) as refusal:
        return refusal
    if standing.situation not in told:
        told[standing.situation] = _compose(ctx, standing, _load(ctx, session, identity.federation_id, standing))
    return told[standing.situation]


def _load(ctx: Context, session: Session, federation_id: int, standing: _Standing) -> _Work | _Pause:
    load = _load_work if standing.has_work else _load_pause
    key, stage = _shared(ctx, federation_id, standing)
    return ctx.answers.get(key, stage, lambda: load(ctx, session, federation_id, standing))


def _shared(ctx: Context, federation_id: int, standing: _Standing) -> tuple[tuple[str, int], tuple[object, ...]]:
    """Return the key and the stage under which the part of an answer that others get, too, is cached."""
    if standing.has_work:
        return ("work", federation_id), standing.stage
    return pause_key(federation_id), (standing.stage, standing.phase, ctx.monotonic() // _FRESH_S)


def _load_work(_ctx: Context, session: Session, federation_id: int, standing: _Standing) -> _Work:
    federation, round_ = session.get_one(Federation, federation_id), session.get_one(Round, standing.round_id)
    view = RoundTaskView(
        id=round_.id,
        number=round_.number,
        facts=facts_of(round_.facts),
        update_url=f"/v1/rounds/{round_.id}/update",
        max_update_bytes=update_spec(session, federation, round_).max_total_bytes,
    )
    return _Work(view, _newest_model(session, federation), plan_of(federation.plan).rounds.deadline_s)


def _load_pause(ctx: Context, session: Session, federation_id: int, _standing: _Standing) -> _Pause:
    federation = session.get_one(Federation, federation_id)
    facts = serving_context(session, federation).facts
    return _Pause(federation.name, _newest_model(session, federation), facts, waiting_for(session, ctx, federation))


def _compose(ctx: Context, standing: _Standing, shared: _Work | _Pause) -> Told:
    if standing.state == "cancelled":
        return Told(TaskAnswer(action="cancelled", ticket=_ticket("cancelled"), reason=standing.reason))
    return Told(_work_for(standing, shared) if isinstance(shared, _Work) else _let_wait(ctx, standing, shared))


def _work_for(standing: _Standing, work: _Work) -> TaskAnswer:
    deadline_s = work.allowance_s
    if standing.clock_started and standing.due_uptime is not None:
        deadline_s = standing.due_uptime - standing.uptime
    return TaskAnswer(
        action="train",
        ticket=_ticket("train", work.round.id, work.model.number),
        round=work.round,
        model=work.model,
        personal_url=f"/v1/rounds/{work.round.id}/personal",
        facts=work.round.facts,
        deadline_s=deadline_s,
    )


def _let_wait(ctx: Context, standing: _Standing, pause: _Pause) -> TaskAnswer:
    action = {"finished": "finished", "paused": "paused"}.get(standing.state, "wait")
    status = describe_waiting(pause.waiting, ctx.clock()) if pause.waiting else "the operator has not started it"
    return TaskAnswer(
        action=action,
        ticket=_ticket(action, model=pause.model.number),
        reason=standing.reason or status,
        model=pause.model,
        personal_url=f"/v1/federations/{pause.federation}/personal?model={pause.model.number}",
        facts=pause.facts,
    )


def pause_key(federation_id: int) -> tuple[str, int]:
    """Return the key under which what clients without work are told is cached."""
    return "pause", federation_id


def _ticket(action: str, round_id: int = 0, model: int = 0) -> str:
    return f"{action}-{round_id}-{model}"


def _newest_model(session: Session, federation: Federation) -> ModelPointer:
    model = latest_model(session, federation)
    blob = session.get_one(Blob, require_blob_id(session, model))
    return ModelPointer(
        number=model.number,
        url=f"/v1/federations/{federation.name}/model?round={model.number}",
        digest=blob.digest or "",
        size_bytes=blob.size_bytes,
    )
