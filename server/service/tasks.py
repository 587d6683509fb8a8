"""What a client should do now.

Thousands of agents ask, often all at once. One statement therefore reads everything that may differ between them or
from moment to moment. The rest is the same for all clients of a federation and cached until its version grows.
"""

from collections.abc import Sequence
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


_STANDING = (
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
    .where(Client.id.in_(bindparam("client_ids", expanding=True)), Federation.deleted_at.is_(None))
)


def task(ctx: Context, identity: Identity) -> TaskAnswer:
    """Return whether to train, wait, or keep serving, and the newest model; raise if the client's access has ended."""
    [answer] = answers(ctx, identity.federation_id, [identity])
    if isinstance(answer, CoordinatorError):
        raise answer
    return answer


def answers(
    ctx: Context, federation_id: int, identities: Sequence[Identity]
) -> list[TaskAnswer | NotAllowed | NotAuthenticated]:
    """Return the task of each of these clients of one federation, or why its access has ended."""
    found: dict[str, _Standing] = {}
    with ctx.db.read() as session:
        for first in range(0, len(identities), _PER_STATEMENT):
            client_ids = [identity.client_id for identity in identities[first : first + _PER_STATEMENT]]
            rows = session.execute(_STANDING, {"client_ids": client_ids})
            found |= {client_id: _Standing(*rest) for client_id, *rest in rows}
        return [_answer(ctx, session, federation_id, found.get(one.client_id), one) for one in identities]


def _answer(
    ctx: Context, session: Session, federation_id: int, standing: _Standing | None, identity: Identity
) -> TaskAnswer | NotAllowed | NotAuthenticated:
    try:
        if standing is None:
            raise deleted_federation()
        require_current(standing.client_state, standing.token_generation, identity)
    except (NotAllowed, NotAuthenticated) as refusal:
        return refusal
    if standing.state == "cancelled":
        return TaskAnswer(action="cancelled", ticket=_ticket("cancelled"), reason=standing.reason)
    give = _give_work if standing.has_work else _let_wait
    return give(ctx, session, federation_id, standing)


def _give_work(ctx: Context, session: Session, federation_id: int, standing: _Standing) -> TaskAnswer:
    def load() -> _Work:
        federation, round_ = session.get_one(Federation, federation_id), session.get_one(Round, standing.round_id)
        facts = facts_of(round_.facts)
        view = RoundTaskView(
            id=round_.id,
            number=round_.number,
            facts=facts,
            update_url=f"/v1/rounds/{round_.id}/update",
            max_update_bytes=update_spec(session, federation, round_).max_total_bytes,
        )
        return _Work(view, _newest_model(session, federation), plan_of(federation.plan).rounds.deadline_s)

    work = ctx.answers.get(("work", federation_id), standing.stage, load)
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


def _let_wait(ctx: Context, session: Session, federation_id: int, standing: _Standing) -> TaskAnswer:
    def load() -> _Pause:
        federation = session.get_one(Federation, federation_id)
        facts = serving_context(session, federation).facts
        return _Pause(federation.name, _newest_model(session, federation), facts, waiting_for(session, ctx, federation))

    turn = ctx.monotonic() // _FRESH_S
    pause = ctx.answers.get(pause_key(federation_id), (standing.stage, standing.phase, turn), load)
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
