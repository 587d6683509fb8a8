"""How a federation moves on: rounds open, close, fail; the federation finishes. Called inside a write transaction."""

import json
import math
from collections.abc import Collection
from dataclasses import replace

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from server.core.rounds import (
    Aggregate,
    Fail,
    Finish,
    LastSigns,
    OpenRound,
    RoundSnapshot,
    StartClock,
    Waiting,
    explain_missing,
    judge_federation,
    judge_round,
)
from server.core.rounds import Participant as ParticipantView
from server.core.sampling import choose_participants
from server.service.context import Actor, Context, client_record, dump_roster, half_of, plan_of, record, wake
from server.service.history import pooled_accuracy
from server.service.uptime import uptime, wall_time
from server.store.session import LOCK
from server.store.tables import Absence, Client, Federation, Model, Participant, Round, Transfer, Update

COORDINATOR = Actor("coordinator")
_LONGEST_REASON = 500


def round_under_way(session: Session, federation: Federation) -> Round | None:
    """The round that is open or aggregating; there is at most one."""
    query = select(Round).where(Round.federation_id == federation.id, Round.state.in_(["open", "aggregating"]))
    return session.execute(query).scalar_one_or_none()


def snapshot(session: Session, federation: Federation, round_: Round) -> RoundSnapshot:
    """What the core needs to judge a round; its times are uptimes. No deadline passes while none is set."""
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
        ParticipantView(name, state == "active", received is not None, last_byte, seen, heard, status_at is not None)
        for name, state, received, last_byte, seen, heard, status_at in rows
    )
    due = math.inf if federation.due_uptime is None else federation.due_uptime
    return RoundSnapshot(round_.number, 0.0, due, participants, round_.clock_started)


def active_clients(session: Session, federation: Federation) -> list[Client]:
    """In the order of their names, which everything that must be reproducible uses; no database's collation does."""
    query = select(Client).where(Client.federation_id == federation.id, Client.state == "active")
    return sorted(session.execute(query).scalars(), key=lambda client: client.name)


def absent_clients(session: Session, federation: Federation, clients: list[Client]) -> list[Client]:
    """Those that have not been heard from for as long as the plan allows."""
    silent_since = uptime(session) - plan_of(federation.plan).rounds.absent_after_s
    return [client for client in clients if client.heard_uptime <= silent_since]


def waiting_for(session: Session, ctx: Context, federation: Federation) -> Waiting | None:
    """What a running federation waits for, by the wall clock; None when it does not wait, or has ended."""
    if federation.state not in ("running", "paused"):
        return None
    round_ = round_under_way(session, federation)
    if round_ is not None and round_.state == "aggregating":
        return Waiting("the aggregation to finish", round_.closed_at or round_.opened_at, None)
    if federation.state == "paused":
        return Waiting("the operator to resume it", federation.state_since, None)
    verdict = _judge_idle(session, federation) if round_ is None else _judge_round(session, federation, round_)
    if not isinstance(verdict, Waiting):
        return None
    since = _joining_since(session, federation) if round_ is None else round_.opened_at
    until = None if verdict.until is None or math.isinf(verdict.until) else wall_time(session, ctx, verdict.until)
    return replace(verdict, since=since, until=until)


def upload_deadline(session: Session, ctx: Context, federation: Federation, round_: Round) -> float | None:
    """When the time to upload is over, by the wall clock; None before it has begun and while it stands still."""
    if round_.state != "open" or not round_.clock_started or federation.due_uptime is None:
        return None
    return wall_time(session, ctx, federation.due_uptime)


def upload_time_left(session: Session, federation: Federation, round_: Round) -> float:
    """Return the seconds a participant has left to upload: the full allowance until the clock starts."""
    if not round_.clock_started or federation.due_uptime is None:
        return plan_of(federation.plan).rounds.deadline_s
    return federation.due_uptime - uptime(session)


def _judge_round(session: Session, federation: Federation, round_: Round) -> Waiting | StartClock | Aggregate | Fail:
    rules = plan_of(federation.plan).rounds
    return judge_round(snapshot(session, federation, round_), rules, uptime(session))


def _judge_idle(session: Session, federation: Federation) -> OpenRound | Finish | Waiting | Fail:
    rules, now = plan_of(federation.plan).rounds, uptime(session)
    clients = active_clients(session, federation)
    return judge_federation(
        rules,
        completed_rounds=federation.completed_rounds,
        active_clients=len(clients),
        absent=[client.name for client in absent_clients(session, federation, clients)],
        waiting_since=now if federation.due_uptime is None else federation.due_uptime - rules.join_deadline_s,
        latest_accuracy=_latest_accuracy(session, federation),
        stale_rounds=federation.stale_rounds,
        now=now,
    )


def _joining_since(session: Session, federation: Federation) -> float:
    """Sites that leave a federation under way give others the whole time to join anew."""
    query = select(func.max(Round.closed_at)).where(Round.federation_id == federation.id)
    return max(federation.state_since, session.execute(query).scalar_one() or 0.0)


def _latest_accuracy(session: Session, federation: Federation) -> float | None:
    """Of the newest model that the clients have had a round's time to measure: the one that the last round began with.

    Its number is not always one less, because a round that failed made no model, and one may have been rolled back.
    """
    newest = latest_model(session, federation).number
    number = base_of(session, federation, newest)
    return None if number is None else pooled_accuracy(session, federation, number)


def base_of(session: Session, federation: Federation, number: int) -> int | None:
    """The model that the round which made this one began with; None for θ⁰ and an imported model."""
    query = select(Round.base_model).where(Round.federation_id == federation.id, Round.number == number)
    return session.execute(query.where(Round.state == "done")).scalar_one_or_none()


def latest_model(session: Session, federation: Federation) -> Model:
    """The newest global model."""
    query = select(Model).where(Model.federation_id == federation.id).order_by(Model.number.desc()).limit(1)
    return session.execute(query).scalar_one()


def advance(session: Session, ctx: Context, federation: Federation) -> None:
    """Take every step that is due now. Safe to call at any time, by any process; the federation's row is locked."""
    session.flush()
    session.refresh(federation, with_for_update=LOCK)
    round_ = round_under_way(session, federation)
    if round_ is not None:
        _advance_round(session, ctx, federation, round_)
        return
    if federation.state != "running":
        return
    verdict = _judge_idle(session, federation)
    if isinstance(verdict, OpenRound):
        _open_round(session, ctx, federation)
    elif isinstance(verdict, Finish):
        set_state(session, ctx, federation, "finished", verdict.reason)
    elif isinstance(verdict, Fail):
        set_state(session, ctx, federation, "paused", verdict.reason, verdict.detail)
    else:
        federation.due_uptime, federation.look_uptime = verdict.until, verdict.look_at


def _advance_round(session: Session, ctx: Context, federation: Federation, round_: Round) -> None:
    if round_.state != "open":
        return
    verdict, rules = _judge_round(session, federation, round_), plan_of(federation.plan).rounds
    federation.look_uptime = None
    if isinstance(verdict, Aggregate):
        note_missing(session, round_)
        round_.state, round_.closed_at = "aggregating", ctx.clock()
        federation.due_uptime = federation.held_s = None
        wake(federation)
    elif isinstance(verdict, Fail):
        fail_round(session, ctx, federation, round_, verdict)
    elif federation.state == "running" and isinstance(verdict, StartClock):
        round_.clock_started, federation.due_uptime = True, uptime(session) + rules.deadline_s
        _advance_round(session, ctx, federation, round_)  # who is absent matters from now on
    elif federation.state == "running" and isinstance(verdict, Waiting):
        federation.look_uptime = verdict.look_at
        if federation.due_uptime is None:  # opened by an older release
            federation.due_uptime = uptime(session) + rules.join_deadline_s


def hold(session: Session, federation: Federation) -> None:
    """From now on time stands still for the federation."""
    federation.look_uptime = None
    if federation.due_uptime is not None:
        federation.held_s, federation.due_uptime = federation.due_uptime - uptime(session), None


def release(session: Session, federation: Federation) -> None:
    """Time goes on for the federation; the round under way has as much left as it had."""
    if federation.held_s is not None and round_under_way(session, federation) is not None:
        federation.due_uptime = uptime(session) + federation.held_s
    federation.held_s = None


def note_seen(session: Session, ctx: Context, round_id: int, client_ids: Collection[str]) -> None:
    """These participants have been handed the round; its clock starts with the one that completes the quorum."""
    round_ = session.get(Round, round_id)
    if round_ is None:
        return
    federation = session.get_one(Federation, round_.federation_id, with_for_update=LOCK)  # first, as everywhere
    session.refresh(round_, with_for_update=LOCK)
    session.execute(
        update(Participant)
        .where(Participant.round_id == round_id, Participant.client_id.in_(client_ids))
        .values(seen=True)
        .execution_options(synchronize_session=False)
    )
    advance(session, ctx, federation)


def fail_round(session: Session, ctx: Context, federation: Federation, round_: Round, why: Fail) -> None:
    """The round is over without a model; the federation pauses and says why."""
    if round_.state == "open":
        note_missing(session, round_)
    round_.state, round_.reason, round_.reason_detail, round_.closed_at = "failed", why.reason, why.detail, ctx.clock()
    record(session, ctx, COORDINATOR, "round.failed", federation.name, round=round_.number, reason=full_reason(round_))
    set_state(session, ctx, federation, "paused", f"round {round_.number} failed: {why.reason}", why.detail)


def note_missing(session: Session, round_: Round) -> None:
    """Record why each participant without an update has none, as far as that is known now."""
    missing = (
        select(Client)
        .join(Participant, Participant.client_id == Client.id)
        .outerjoin(Update, (Update.round_id == round_.id) & (Update.client_id == Client.id))
        .where(Participant.round_id == round_.id, Update.client_id.is_(None))
    )
    for client in session.execute(missing).scalars():
        session.merge(Absence(round_id=round_.id, client_id=client.id, reason=_explain(session, client)))


def _explain(session: Session, client: Client) -> str:
    signs = LastSigns(
        state=client.state,
        last_seen_at=client.last_seen_at,
        silent_s=uptime(session) - client.heard_uptime,
        reports=client.status_at is not None,
        detail=client.activity_detail or client.activity,
        troubles=tuple(trouble["message"] for trouble in json.loads(client.troubles)),
    )
    return explain_missing(signs)[:_LONGEST_REASON]


def full_reason(row: Federation | Round) -> str:
    """The reason with what only the operator may know."""
    return "; ".join(filter(None, (row.reason, row.reason_detail)))


def set_state(
    session: Session, ctx: Context, federation: Federation, state: str, reason: str, detail: str = ""
) -> None:
    """The coordinator itself pauses or finishes a federation."""
    federation.state, federation.reason, federation.reason_detail = state, reason, detail
    federation.state_since = ctx.clock()
    hold(session, federation)
    ctx.touch(federation)
    record(session, ctx, COORDINATOR, f"federation.{state}", federation.name, reason=full_reason(federation))


def _open_round(session: Session, ctx: Context, federation: Federation) -> None:
    plan, half, now = plan_of(federation.plan), half_of(federation.plan), ctx.clock()
    clients = active_clients(session, federation)
    absent = absent_clients(session, federation, clients)
    roster = [client_record(client) for client in clients]
    last = session.execute(
        select(Round.number).where(Round.federation_id == federation.id).order_by(Round.number.desc()).limit(1)
    ).scalar_one_or_none()
    number = max(last or 0, latest_model(session, federation).number) + 1  # an imported federation has no old rounds
    round_ = Round(
        federation_id=federation.id,
        number=number,
        base_model=latest_model(session, federation).number,
        state="open",
        facts=json.dumps(half.facts(roster), sort_keys=True),
        roster=dump_roster(roster),
        opened_at=now,
    )
    session.add(round_)
    session.flush()
    ids = {client.name: client.id for client in clients if client not in absent}
    chosen = choose_participants(ids, plan.rounds.sample_fraction, plan.seed, number)
    session.add_all(Participant(round_id=round_.id, client_id=ids[name]) for name in chosen)
    session.add_all(
        Absence(round_id=round_.id, client_id=client.id, reason=f"not chosen: {_explain(session, client)}")
        for client in absent
    )
    federation.look_uptime = None
    federation.due_uptime = uptime(session) + plan.rounds.join_deadline_s  # for a quorum of them to show up
    ctx.touch(federation)
