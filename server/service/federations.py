"""Federations: create, start, pause, resume, cancel, and show."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.orm import Session

from server.compute.torch_calls import torch_calls
from server.core.errors import Conflict
from server.core.lifecycle import UNDER_WAY, describe_waiting
from server.service.audit import record_action
from server.service.context import Actor, Context, client_record, facts_of, notify_agents, plan_of, server_half_of
from server.service.measurements.convergence import suggest_rounds
from server.service.measurements.verdicts import verdicts
from server.service.monitoring import stored_bytes
from server.service.queries import active_clients, load_federation, round_under_way
from server.service.transitions import (
    advance,
    full_reason,
    pause_clock,
    resume_clock,
    upload_deadline,
    waiting_for,
)
from server.store import blobs
from server.store.tables import Client, Federation, Model, Participant, Round, Update
from shared.contract.messages import FederationView, RoundSummary
from shared.contract.plan import FederationPlan
from shared.contract.plan_warnings import plan_warnings
from shared.learning.methods.base import known_counts
from shared.tensors.wire import Encoded

logger = logging.getLogger(__name__)
_PAST = {"start": "started", "pause": "paused", "resume": "resumed", "cancel": "cancelled"}
_REFUSAL = {
    "created": "has not been started and cannot",
    "running": "is running and cannot",
    "paused": "is paused and cannot",
    "finished": "has finished and can no longer",
    "cancelled": "was cancelled and can no longer",
}


def create(ctx: Context, actor: Actor, plan: FederationPlan, weights: Path | None = None) -> None:
    """Create a federation in state `created`, with its θ⁰."""
    with ctx.db.read() as session:
        _refuse_taken_name(session, plan.name)
    plan_json = plan.model_dump_json()
    state = torch_calls().initial_state(plan_json, weights)
    now = ctx.clock()
    model_id = blobs.store(ctx.db, Encoded(state.shared, {"plan": plan_json, "model": "0"}))
    private_id = blobs.store(ctx.db, Encoded(state.private)) if state.private else None
    try:
        with ctx.db.write() as session:
            federation = Federation(
                name=plan.name, plan=plan_json, state="created", created_at=now, state_since=now, version=0
            )
            session.add(federation)
            session.flush()
            session.add(
                Model(
                    federation_id=federation.id, number=0, blob_id=model_id, private_blob_id=private_id, created_at=now
                )
            )
            record_action(session, ctx, actor, "federation.create", plan.name)
    except IntegrityError as error:
        raise name_taken(plan.name) from error


def _refuse_taken_name(session: Session, name: str) -> None:
    if session.execute(select(Federation.id).where(Federation.name == name)).first():
        raise name_taken(name)


def name_taken(name: str, next_step: str = "Choose another name.") -> Conflict:
    """Return the error for a federation name already in use."""
    return Conflict("name-taken", f"A federation named {name!r} already exists.", next_step=next_step)


def start(ctx: Context, actor: Actor, name: str) -> None:
    """Start the federation; its first round opens once `min_clients` have joined. Idempotent."""
    _change(ctx, actor, name, "start", {"created": "running"}, unchanged=("running",))


def pause(ctx: Context, actor: Actor, name: str, reason: str = "paused by the operator") -> None:
    """Stop the deadlines and open no more rounds until `resume`; the open round still accepts uploads. Idempotent."""
    _change(ctx, actor, name, "pause", {"running": "paused"}, unchanged=("paused",), reason=reason)


def resume(ctx: Context, actor: Actor, name: str) -> None:
    """Resume the federation; the open round has as much time left as before the pause. Idempotent."""
    _change(ctx, actor, name, "resume", {"paused": "running"}, unchanged=("running",))


def cancel(ctx: Context, actor: Actor, name: str) -> None:
    """End the federation for good: the open round fails, the models stay. Idempotent."""
    open_states = {"created": "cancelled", "running": "cancelled", "paused": "cancelled"}
    _change(ctx, actor, name, "cancel", open_states, unchanged=("cancelled",), reason="cancelled by the operator")


def _change(
    ctx: Context,
    actor: Actor,
    name: str,
    action: str,
    moves: dict[str, str],
    unchanged: tuple[str, ...],
    reason: str = "",
) -> None:
    now = ctx.clock()
    if "running" in moves.values():
        _load_method(ctx, name)
    with ctx.db.write() as session:
        federation = load_federation(session, name, lock=True)
        if federation.state in unchanged:
            return
        if federation.state not in moves:
            raise Conflict(
                "wrong-state",
                f"Federation {name!r} {_REFUSAL[federation.state]} be {_PAST[action]}.",
                next_step=f"Only a {' or '.join(moves)} federation can be {_PAST[action]}.",
            )
        open_round = round_under_way(session, federation)
        if action == "cancel" and open_round is not None:
            open_round.state, open_round.reason, open_round.closed_at = "failed", reason, now
        federation.state, federation.reason, federation.reason_detail = moves[federation.state], reason, ""
        federation.state_since = now
        if federation.state == "running":
            resume_clock(session, federation)
        else:
            pause_clock(session, federation)
        notify_agents(federation)
        record_action(session, ctx, actor, f"federation.{action}", name)
        if federation.state == "running":
            advance(session, ctx, federation)


def _load_method(ctx: Context, name: str) -> None:
    """Load the method if a round is about to open: imports take too long for a transaction."""
    with ctx.db.read() as session:
        federation = load_federation(session, name)
        if len(active_clients(session, federation)) >= plan_of(federation.plan).rounds.min_clients:
            server_half_of(federation.plan)


@dataclass(frozen=True)
class Members:
    """The clients of a federation and the heterogeneity of their data."""

    clients: Sequence[Client]
    dh: float | None


def active_members(session: Session, federation: Federation) -> Members:
    """Return the active clients, sorted by name, and the heterogeneity of those that tell their class counts."""
    from shared.learning.heterogeneity import (
        distributional_heterogeneity,
    )  # imports numpy, which most commands do not need

    clients = active_clients(session, federation)
    counts = known_counts(client_record(client) for client in clients)
    return Members(clients, distributional_heterogeneity(counts) if counts else None)


def view(
    session: Session, ctx: Context, federation: Federation, *, for_operator: bool, with_plan: bool = True
) -> FederationView:
    """Return a federation as the API and the commands show it; clients see how many others there are, not who."""
    now = ctx.clock()
    plan, members = plan_of(federation.plan), active_members(session, federation)
    under_way = round_under_way(session, federation)
    waiting = waiting_for(session, ctx, federation)
    latest = session.execute(select(func.max(Model.number)).where(Model.federation_id == federation.id)).scalar_one()
    return FederationView(
        name=federation.name,
        state=federation.state,
        reason=full_reason(federation) if for_operator else federation.reason,
        state_since=federation.state_since,
        waiting_for=describe_waiting(waiting, now, for_operator=for_operator) if waiting else None,
        waiting_since=waiting.since if waiting else None,
        waiting_until=waiting.until if waiting else None,
        method=plan.method.name,
        rounds_done=federation.completed_rounds,
        rounds_total=plan.rounds.count,
        round=summarize_round(session, ctx, under_way, for_operator=for_operator) if under_way else None,
        latest_model=latest,
        clients=len(members.clients),
        dh=members.dh,
        best_accuracy=federation.best_accuracy,
        best_model=federation.best_model,
        plan=plan if with_plan else None,
        warnings=plan_warnings(plan),
    )


def summarize_round(
    session: Session, ctx: Context, round_: Round, counts: tuple[int, int] | None = None, *, for_operator: bool
) -> RoundSummary:
    """Return a round as the API shows it; `counts` are its participants and updates, if already known."""
    participants, updates = counts or (
        session.execute(select(func.count()).where(table.round_id == round_.id)).scalar_one()
        for table in (Participant, Update)
    )
    waiting = deadline_at = None
    if round_.state in UNDER_WAY:
        federation = session.get_one(Federation, round_.federation_id)
        found = waiting_for(session, ctx, federation)
        waiting = describe_waiting(found, ctx.clock(), for_operator=for_operator) if found else None
        deadline_at = upload_deadline(session, ctx, federation, round_)
    return RoundSummary(
        id=round_.id,
        number=round_.number,
        state=round_.state,
        reason=full_reason(round_) if for_operator else round_.reason,
        waiting_for=waiting,
        facts=facts_of(round_.facts),
        participants=participants,
        updates=updates,
        opened_at=round_.opened_at,
        deadline_at=deadline_at,
        closed_at=round_.closed_at,
    )


def list_all(ctx: Context, only: int | None = None) -> list[FederationView]:
    """List all federations, or only the one a client belongs to, without their plans."""
    with ctx.db.read() as session:
        query = select(Federation).where(Federation.deleted_at.is_(None)).order_by(Federation.name)
        if only is not None:
            query = query.where(Federation.id == only)
        rows = session.execute(query).scalars().all()
        return [_list_item(session, ctx, row, for_operator=only is None) for row in rows]


def _list_item(session: Session, ctx: Context, federation: Federation, *, for_operator: bool) -> FederationView:
    """Return the view, or a stub if its stored data is unreadable: the other federations must still be listed."""
    try:
        return view(session, ctx, federation, for_operator=for_operator, with_plan=False)
    except SQLAlchemyError:  # storage failure: none of them can be read
        raise
    except Exception as error:
        logger.exception("federation %s could not be shown", federation.name)
        cause = f": {type(error).__name__}: {error}"[:500] if for_operator else ""
        return FederationView(
            name=federation.name,
            state=federation.state,
            reason=f"its stored data cannot be read{cause}",
            state_since=federation.state_since,
            waiting_for=None,
            waiting_since=None,
            waiting_until=None,
            method="unknown",
            rounds_done=federation.completed_rounds,
            rounds_total=0,
            round=None,
            latest_model=0,
            clients=0,
            dh=None,
            best_accuracy=federation.best_accuracy,
            best_model=federation.best_model,
        )


def show(ctx: Context, name: str, only_client: str | None = None) -> FederationView:
    """Return one federation with its plan, and whether joining and its number of rounds paid off.

    A client sees only its own verdict.
    """
    with ctx.db.read() as session:
        federation = load_federation(session, name)
        shown = view(session, ctx, federation, for_operator=only_client is None)
        found, summary = verdicts(session, federation, only_client)
        more = suggest_rounds(session, federation, shown.rounds_total)
        stored = stored_bytes(session, federation.id) if only_client is None else None
        added = {"verdicts": found, "verdict_summary": summary, "more_rounds": more, "stored_bytes": stored}
        return shown.model_copy(update=added)
