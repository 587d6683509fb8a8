"""Carries out what `server.core.lifecycle` decides: opens, closes and fails rounds, pauses and finishes federations."""

import json
import math
from collections.abc import Collection
from dataclasses import replace

from sqlalchemy import func, insert, select, update
from sqlalchemy.orm import Session

from server.core.lifecycle import (
    Aggregate,
    Fail,
    Finish,
    LastContact,
    OpenRound,
    ParticipantSnapshot,
    RoundSnapshot,
    StartClock,
    Waiting,
    decide_federation,
    decide_round,
    explain_missing,
)
from server.core.sampling import choose_participants
from server.service.audit import record_action
from server.service.context import (
    Actor,
    Context,
    client_record,
    dump_context,
    notify_agents,
    plan_of,
    server_half_of,
    wake_aggregator,
    wake_cleaner,
)
from server.service.measurements.pooling import pooled_accuracy
from server.service.queries import active_clients, base_of, latest_model, next_number, round_under_way
from server.service.uptime import uptime, wall_time
from server.store.database import LOCK
from server.store.tables import Absence, Client, Federation, Participant, Round, Transfer, Update
from shared.learning.methods.base import RoundContext

COORDINATOR = Actor("coordinator")
_LONGEST_REASON = 500


def _snapshot(session: Session, federation: Federation, round_: Round) -> RoundSnapshot:
    """Return what the core needs to decide about a round, in uptime. Without a deadline, none can pass."""
    rows = session.execute(
        select(
            Client.name,
            Client.state,
            Update.received_at,
            Transfer.grown_uptime,
            Participant.seen,
            Client.heard_uptime,
            Client.status_at,
        )
        .join(Participant, Participant.client_id == Client.id)
        .outerjoin(Update, (Update.round_id == round_.id) & (Update.client_id == Client.id))
        .outerjoin(Transfer, (Transfer.round_id == round_.id) & (Transfer.client_id == Client.id))
        .where(Participant.round_id == round_.id)
        .order_by(Client.name)
    )
    participants = tuple(
        ParticipantSnapshot(
            name, state == "active", received is not None, last_byte, seen, heard, status_at is not None
        )
        for name, state, received, last_byte, seen, heard, status_at in rows
    )
    due = math.inf if federation.due_uptime is None else federation.due_uptime
    return RoundSnapshot(due, participants, round_.clock_started)


def _silent_since(session: Session, federation: Federation) -> float:
    """Return the uptime since when an absent client has been silent: for longer than the plan allows."""
    return uptime(session) - plan_of(federation.plan).rounds.absent_after_s


def waiting_for(session: Session, ctx: Context, federation: Federation) -> Waiting | None:
    """Return what a federation is waiting for, in wall-clock time; None if nothing, or if it has ended."""
    if federation.state not in ("running", "paused"):
        return None
    round_ = round_under_way(session, federation)
    if round_ is not None and round_.state == "aggregating":
        return Waiting("the aggregation to finish", None, since=round_.closed_at or round_.opened_at)
    if federation.state == "paused":
        return Waiting("the operator to resume it", None, since=federation.state_since)
    decision = _decide_idle(session, federation) if round_ is None else _decide_round(session, federation, round_)
    if not isinstance(decision, Waiting):
        return None
    since = _joining_since(session, federation) if round_ is None else round_.opened_at
    until = None if decision.until is None or math.isinf(decision.until) else wall_time(session, ctx, decision.until)
    return replace(decision, since=since, until=until)


def upload_deadline(session: Session, ctx: Context, federation: Federation, round_: Round) -> float | None:
    """Return the upload deadline in wall-clock time; None before it starts to run and while paused."""
    if round_.state != "open" or not round_.clock_started or federation.due_uptime is None:
        return None
    return wall_time(session, ctx, federation.due_uptime)


def upload_time_left(session: Session, federation: Federation, round_: Round) -> float:
    """Return the seconds left to upload: the full allowance until the deadline starts to run."""
    if not round_.clock_started or federation.due_uptime is None:
        return plan_of(federation.plan).rounds.deadline_s
    return federation.due_uptime - uptime(session)


def _decide_round(session: Session, federation: Federation, round_: Round) -> Waiting | StartClock | Aggregate | Fail:
    rules = plan_of(federation.plan).rounds
    return decide_round(_snapshot(session, federation, round_), rules, uptime(session))


def _decide_idle(session: Session, federation: Federation) -> OpenRound | Finish | Waiting | Fail:
    rules, now = plan_of(federation.plan).rounds, uptime(session)
    query = select(Client.name, Client.heard_uptime)
    query = query.where(Client.federation_id == federation.id, Client.state == "active")
    heard, silent_since = session.execute(query).all(), _silent_since(session, federation)
    return decide_federation(
        rules,
        completed_rounds=federation.completed_rounds,
        active_clients=len(heard),
        absent=[name for name, heard_uptime in heard if heard_uptime <= silent_since],
        waiting_since=now if federation.due_uptime is None else federation.due_uptime - rules.join_deadline_s,
        latest_accuracy=_latest_accuracy(session, federation),
        stale_rounds=federation.stale_rounds,
        now=now,
    )


def _joining_since(session: Session, federation: Federation) -> float:
    """Return when it started to wait for clients: if sites leave, others get the full time to join again."""
    query = select(func.max(Round.closed_at)).where(Round.federation_id == federation.id)
    return max(federation.state_since, session.execute(query).scalar_one() or 0.0)


def _latest_accuracy(session: Session, federation: Federation) -> float | None:
    """Return the accuracy of the newest model that clients had a whole round to measure: the last round's base.

    Its number may be lower by more than one: failed rounds produce no model, and a model may have been rolled back.
    """
    newest = latest_model(session, federation).number
    number = base_of(session, federation, newest)
    return None if number is None else pooled_accuracy(session, federation, number)


def advance(session: Session, ctx: Context, federation: Federation) -> None:
    """Take every step that is due, in the caller's write transaction. Safe at any time: locks the federation's row."""
    session.flush()
    session.refresh(federation, with_for_update=LOCK)
    round_ = round_under_way(session, federation)
    if round_ is not None:
        _advance_round(session, ctx, federation, round_)
        return
    if federation.state != "running":
        return
    decision = _decide_idle(session, federation)
    if isinstance(decision, OpenRound):
        _open_round(session, ctx, federation)
    elif isinstance(decision, Finish):
        set_state(session, ctx, federation, "finished", decision.reason)
    elif isinstance(decision, Fail):
        set_state(session, ctx, federation, "paused", decision.reason, decision.detail)
    else:
        federation.due_uptime, federation.look_uptime = decision.until, decision.recheck_at


def _advance_round(session: Session, ctx: Context, federation: Federation, round_: Round) -> None:
    if round_.state != "open":
        return
    decision, rules = _decide_round(session, federation, round_), plan_of(federation.plan).rounds
    federation.look_uptime = None
    if isinstance(decision, Aggregate):
        _record_absences(session, round_)
        round_.state, round_.closed_at = "aggregating", ctx.clock()
        federation.due_uptime = federation.held_s = None
        wake_aggregator(federation)
    elif isinstance(decision, Fail):
        fail_round(session, ctx, federation, round_, decision)
    elif federation.state == "running" and isinstance(decision, StartClock):
        round_.clock_started, federation.due_uptime = True, uptime(session) + rules.deadline_s
        _advance_round(session, ctx, federation, round_)  # absence matters from now on
    elif federation.state == "running" and isinstance(decision, Waiting):
        federation.look_uptime = decision.recheck_at
        if federation.due_uptime is None:  # opened by an older release
            federation.due_uptime = uptime(session) + rules.join_deadline_s


def pause_clock(session: Session, federation: Federation) -> None:
    """Stop the federation's deadlines."""
    federation.look_uptime = None
    if federation.due_uptime is not None:
        federation.held_s, federation.due_uptime = federation.due_uptime - uptime(session), None


def resume_clock(session: Session, federation: Federation) -> None:
    """Restart the federation's deadlines; the current round has as much time left as before the pause."""
    if federation.held_s is not None and round_under_way(session, federation) is not None:
        federation.due_uptime = uptime(session) + federation.held_s
    federation.held_s = None


def mark_seen(session: Session, ctx: Context, round_id: int, client_ids: Collection[str]) -> None:
    """Record that these participants were handed the round; a quorum of them starts the upload deadline."""
    round_ = session.get(Round, round_id)
    if round_ is None:
        return
    federation = session.get_one(Federation, round_.federation_id, with_for_update=LOCK)  # always before its rounds
    session.refresh(round_, with_for_update=LOCK)
    session.execute(
        update(Participant)
        .where(Participant.round_id == round_id, Participant.client_id.in_(client_ids))
        .values(seen=True)
        .execution_options(synchronize_session=False)
    )
    advance(session, ctx, federation)


def fail_round(session: Session, ctx: Context, federation: Federation, round_: Round, why: Fail) -> None:
    """End the round without a model, and pause the federation with the reason."""
    if round_.state == "open":
        _record_absences(session, round_)
    round_.state, round_.reason, round_.reason_detail, round_.closed_at = "failed", why.reason, why.detail, ctx.clock()
    record_action(
        session, ctx, COORDINATOR, "round.failed", federation.name, round=round_.number, reason=full_reason(round_)
    )
    set_state(session, ctx, federation, "paused", f"round {round_.number} failed: {why.reason}", why.detail)
    wake_cleaner(federation)


def _record_absences(session: Session, round_: Round) -> None:
    """Record for each participant without an update why it is missing, as far as known."""
    missing = (
        select(Client)
        .join(Participant, Participant.client_id == Client.id)
        .outerjoin(Update, (Update.round_id == round_.id) & (Update.client_id == Client.id))
        .where(Participant.round_id == round_.id, Update.client_id.is_(None))
    )
    for client in session.execute(missing).scalars():
        session.merge(Absence(round_id=round_.id, client_id=client.id, reason=_explain(session, client)))


def _explain(session: Session, client: Client) -> str:
    contact = LastContact(
        state=client.state,
        last_seen_at=client.last_seen_at,
        silent_s=uptime(session) - client.heard_uptime,
        reports=client.status_at is not None,
        detail=client.activity_detail or client.activity,
        troubles=tuple(trouble["message"] for trouble in json.loads(client.troubles)),
    )
    return explain_missing(contact)[:_LONGEST_REASON]


def full_reason(row: Federation | Round) -> str:
    """Return the reason including details for the operator."""
    return "; ".join(filter(None, (row.reason, row.reason_detail)))


def set_state(
    session: Session, ctx: Context, federation: Federation, state: str, reason: str, detail: str = ""
) -> None:
    """Pause or finish a federation on the coordinator's own initiative."""
    federation.state, federation.reason, federation.reason_detail = state, reason, detail
    federation.state_since = ctx.clock()
    pause_clock(session, federation)
    notify_agents(federation)
    record_action(session, ctx, COORDINATOR, f"federation.{state}", federation.name, reason=full_reason(federation))


def _open_round(session: Session, ctx: Context, federation: Federation) -> None:
    plan, half, now = plan_of(federation.plan), server_half_of(federation.plan), ctx.clock()
    clients = active_clients(session, federation)
    silent_since = _silent_since(session, federation)
    absent = [client for client in clients if client.heard_uptime <= silent_since]
    roster = [client_record(client) for client in clients]
    number = next_number(session, federation)
    round_ = Round(
        federation_id=federation.id,
        number=number,
        base_model=latest_model(session, federation).number,
        state="open",
        opened_at=now,
        **dump_context(RoundContext(roster, half.facts(roster))),
    )
    session.add(round_)
    session.flush()
    ids = {client.name: client.id for client in clients if client not in absent}
    chosen = choose_participants(ids, plan.rounds.sample_fraction, plan.seed, number)
    # Without an object each: all clients wait for this transaction.
    rows = [{"round_id": round_.id, "client_id": ids[name]} for name in chosen]
    if rows:
        session.execute(insert(Participant), rows)
    session.add_all(
        Absence(round_id=round_.id, client_id=client.id, reason=f"not chosen: {_explain(session, client)}")
        for client in absent
    )
    federation.look_uptime = None
    federation.due_uptime = uptime(session) + plan.rounds.join_deadline_s  # for a quorum to connect
    notify_agents(federation)
