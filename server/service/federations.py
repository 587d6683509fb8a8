"""Federations: create, look, start, pause, resume, cancel."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.orm import Session

from server.core.errors import Conflict, NotFound
from server.core.rounds import describe
from server.pretrained import load_pretrained
from server.service.context import Actor, Context, client_record, facts_of, half_of, plan_of, record
from server.service.progress import (
    active_clients,
    advance,
    full_reason,
    hold,
    release,
    round_under_way,
    upload_deadline,
    waiting_for,
)
from server.store import blobs
from server.store.tables import Client, Federation, Model, Participant, Round, Update
from shared.near_match import did_you_mean
from shared.plan import FederationPlan
from shared.schemas import FederationView, RoundSummary
from shared.wire import encode

logger = logging.getLogger(__name__)


def create(ctx: Context, actor: Actor, plan: FederationPlan, weights: Path | None = None) -> None:
    """A new federation in state `created`, with its θ⁰."""
    with ctx.db.read() as session:
        _refuse_taken_name(session, plan.name)
    plan_json = plan.model_dump_json()
    state = half_of(plan_json).initial_state(load_pretrained(plan, weights))
    now = ctx.clock()
    model_id = blobs.store(ctx.db, encode(state.shared, {"plan": plan_json, "model": "0"}))
    private_id = blobs.store(ctx.db, encode(state.private)) if state.private else None
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
            record(session, ctx, actor, "federation.create", plan.name)
    except IntegrityError as error:
        raise _taken(plan.name) from error


def _refuse_taken_name(session: Session, name: str) -> None:
    if session.execute(select(Federation.id).where(Federation.name == name)).first():
        raise _taken(name)


def _taken(name: str) -> Conflict:
    return Conflict("name-taken", f"There is a federation {name!r} already.", next_step="Choose another name.")


def load(session: Session, name: str, *, lock: bool = False) -> Federation:
    """The federation of this name; `lock` holds its row until the transaction ends."""
    query = select(Federation).where(Federation.name == name, Federation.deleted_at.is_(None))
    federation = session.execute(query.with_for_update(key_share=True) if lock else query).scalar_one_or_none()
    if federation is None:
        # Only the operator gets here with a name of choice; a client may look at its own federation alone.
        names = session.execute(select(Federation.name).where(Federation.deleted_at.is_(None))).scalars()
        near = did_you_mean(name, names) or "."
        raise NotFound("no-such-federation", f"There is no federation {name!r}{near}")
    return federation


def start(ctx: Context, actor: Actor, name: str) -> None:
    """Begin; does nothing when it is running already."""
    _change(ctx, actor, name, "start", {"created": "running"}, unchanged=("running",))


def pause(ctx: Context, actor: Actor, name: str, reason: str = "paused by the operator") -> None:
    """No new round opens and no deadline passes until it is resumed; uploads of the open round are still taken."""
    _change(ctx, actor, name, "pause", {"running": "paused"}, unchanged=("paused",), reason=reason)


def resume(ctx: Context, actor: Actor, name: str) -> None:
    """Go on; the open round has as much time left as it had before the pause."""
    _change(ctx, actor, name, "resume", {"paused": "running"}, unchanged=("running",))


def cancel(ctx: Context, actor: Actor, name: str) -> None:
    """End it for good; the open round fails, the models stay."""
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
        federation = load(session, name, lock=True)
        if federation.state in unchanged:
            return
        if federation.state not in moves:
            raise Conflict(
                "wrong-state",
                f"Federation {name!r} is {federation.state}: it cannot {action} now.",
                next_step=f"{action.capitalize()} is possible when it is {' or '.join(moves)}.",
            )
        open_round = round_under_way(session, federation)
        if action == "cancel" and open_round is not None:
            open_round.state, open_round.reason, open_round.closed_at = "failed", reason, now
        federation.state, federation.reason, federation.reason_detail = moves[federation.state], reason, ""
        federation.state_since = now
        if federation.state == "running":
            release(session, federation)
        else:
            hold(session, federation)
        ctx.touch(federation)
        record(session, ctx, actor, f"federation.{action}", name)
        if federation.state == "running":
            advance(session, ctx, federation)


def _load_method(ctx: Context, name: str) -> None:
    """Load what opening a round needs if one is going to open: loading torch takes too long inside a transaction."""
    with ctx.db.read() as session:
        federation = load(session, name)
        if len(active_clients(session, federation)) >= plan_of(federation.plan).rounds.min_clients:
            half_of(federation.plan)


@dataclass(frozen=True)
class Roster:
    """The clients of a federation and how much their data differ."""

    clients: Sequence[Client]
    dh: float | None


def roster(session: Session, federation: Federation) -> Roster:
    """The active clients in the order of their names."""
    from shared.heterogeneity import distributional_heterogeneity  # numpy, which most commands do not need

    clients = active_clients(session, federation)
    counts = [client_record(client).class_counts for client in clients]
    return Roster(clients, distributional_heterogeneity(counts) if counts else None)


def view(
    session: Session, ctx: Context, federation: Federation, *, for_operator: bool, with_plan: bool = True
) -> FederationView:
    """A federation as the API and the command line show it; clients are told how many others there are, not who."""
    now = ctx.clock()
    plan, members = plan_of(federation.plan), roster(session, federation)
    under_way = round_under_way(session, federation)
    waiting = waiting_for(session, ctx, federation)
    latest = session.execute(select(func.max(Model.number)).where(Model.federation_id == federation.id)).scalar_one()
    return FederationView(
        name=federation.name,
        state=federation.state,
        reason=full_reason(federation) if for_operator else federation.reason,
        state_since=federation.state_since,
        waiting_for=describe(waiting, now, for_operator=for_operator) if waiting else None,
        waiting_since=waiting.since if waiting else None,
        waiting_until=waiting.until if waiting else None,
        method=plan.method.name,
        rounds_done=federation.completed_rounds,
        rounds_total=plan.rounds.count,
        round=summarise(session, ctx, under_way, for_operator=for_operator) if under_way else None,
        latest_model=latest,
        clients=len(members.clients),
        dh=members.dh,
        best_accuracy=federation.best_accuracy,
        best_model=federation.best_model,
        plan=plan if with_plan else None,
    )


def summarise(
    session: Session, ctx: Context, round_: Round, counts: tuple[int, int] | None = None, *, for_operator: bool
) -> RoundSummary:
    """A round as the API shows it; `counts` are its participants and updates, if they are known already."""
    participants, updates = counts or (
        session.execute(select(func.count()).where(table.round_id == round_.id)).scalar_one()
        for table in (Participant, Update)
    )
    waiting = deadline_at = None
    if round_.state in ("open", "aggregating"):
        federation = session.get_one(Federation, round_.federation_id)
        found = waiting_for(session, ctx, federation)
        waiting = describe(found, ctx.clock(), for_operator=for_operator) if found else None
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
    """All federations, or the one that a client belongs to, without their plans."""
    with ctx.db.read() as session:
        query = select(Federation).where(Federation.deleted_at.is_(None)).order_by(Federation.name)
        if only is not None:
            query = query.where(Federation.id == only)
        rows = session.execute(query).scalars().all()
        return [_listed(session, ctx, row, for_operator=only is None) for row in rows]


def _listed(session: Session, ctx: Context, federation: Federation, *, for_operator: bool) -> FederationView:
    """The view, or, where its stored data cannot be read, what is known without them; the others must still be seen."""
    try:
        return view(session, ctx, federation, for_operator=for_operator, with_plan=False)
    except SQLAlchemyError:  # the storage itself: none of them can be read
        raise
    except Exception as error:
        logger.exception("federation %s cannot be shown", federation.name)
        cause = f": {type(error).__name__}: {error}"[:500] if for_operator else ""
        return FederationView(
            name=federation.name,
            state=federation.state,
            reason=f"Its stored data cannot be read{cause}",
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


def show(ctx: Context, name: str, *, for_operator: bool = True) -> FederationView:
    """One federation with its plan."""
    with ctx.db.read() as session:
        return view(session, ctx, load(session, name), for_operator=for_operator)
