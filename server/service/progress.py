"""How a federation moves on: rounds open, close, fail; the federation finishes. Called inside a write transaction."""

import json

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from server.core.rounds import (
    Aggregate,
    Fail,
    Finish,
    OpenRound,
    RoundSnapshot,
    Waiting,
    judge_federation,
    judge_round,
)
from server.core.rounds import Participant as ParticipantView
from server.core.sampling import choose_participants
from server.service.context import Actor, Context, client_record, dump_roster, half_of, plan_of, record, wake
from server.service.history import pooled_accuracy
from server.store.session import LOCK
from server.store.tables import Client, Federation, Model, Participant, Round, Transfer, Update

COORDINATOR = Actor("coordinator")


def round_under_way(session: Session, federation: Federation) -> Round | None:
    """The round that is open or aggregating; there is at most one."""
    query = select(Round).where(Round.federation_id == federation.id, Round.state.in_(["open", "aggregating"]))
    return session.execute(query).scalar_one_or_none()


def snapshot(session: Session, round_: Round) -> RoundSnapshot:
    """What the core needs to judge a round."""
    rows = session.execute(
        select(Client.name, Client.state, Update.received_at, Transfer.last_byte_at)
        .join(Participant, Participant.client_id == Client.id)
        .outerjoin(Update, (Update.round_id == round_.id) & (Update.client_id == Client.id))
        .outerjoin(Transfer, (Transfer.round_id == round_.id) & (Transfer.client_id == Client.id))
        .where(Participant.round_id == round_.id)
        .order_by(Client.name)
    )
    participants = tuple(
        ParticipantView(name, state == "active", received is not None, last_byte)
        for name, state, received, last_byte in rows
    )
    return RoundSnapshot(round_.number, round_.opened_at, round_.deadline_at, participants)


def active_clients(session: Session, federation: Federation) -> list[Client]:
    """In the order of their names, which everything that must be reproducible uses; no database's collation does."""
    query = select(Client).where(Client.federation_id == federation.id, Client.state == "active")
    return sorted(session.execute(query).scalars(), key=lambda client: client.name)


def waiting_for(session: Session, ctx: Context, federation: Federation) -> Waiting | None:
    """What a running federation waits for; None when it does not wait, or has ended."""
    if federation.state not in ("running", "paused"):
        return None
    round_ = round_under_way(session, federation)
    if round_ is not None and round_.state == "aggregating":
        return Waiting("the aggregation to finish", round_.closed_at or round_.opened_at, None)
    if federation.state == "paused":
        return Waiting("the operator to resume it", federation.state_since, None)
    rules = plan_of(federation.plan).rounds
    verdict = (
        _judge(session, ctx, federation)
        if round_ is None
        else judge_round(snapshot(session, round_), rules, ctx.clock())
    )
    return verdict if isinstance(verdict, Waiting) else None


def _judge(session: Session, ctx: Context, federation: Federation) -> OpenRound | Finish | Waiting | Fail:
    return judge_federation(
        plan_of(federation.plan).rounds,
        completed_rounds=federation.completed_rounds,
        active_clients=len(active_clients(session, federation)),
        waiting_since=max(federation.state_since, _last_round_closed_at(session, federation)),
        latest_accuracy=_latest_accuracy(session, federation),
        stale_rounds=federation.stale_rounds,
        now=ctx.clock(),
    )


def _last_round_closed_at(session: Session, federation: Federation) -> float:
    """Sites that leave a federation under way give others the whole time to join anew."""
    query = select(func.max(Round.closed_at)).where(Round.federation_id == federation.id)
    return session.execute(query).scalar_one() or 0.0


def _latest_accuracy(session: Session, federation: Federation) -> float | None:
    """Of the newest model that the clients have had a round's time to measure: the last but one.

    Its number is not always one less, because a round that failed made no model.
    """
    query = select(Model.number).where(Model.federation_id == federation.id).order_by(Model.number.desc())
    number = session.execute(query.offset(1).limit(1)).scalar_one_or_none()
    return None if number is None else pooled_accuracy(session, federation, number)


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
    verdict = _judge(session, ctx, federation)
    if isinstance(verdict, OpenRound):
        _open_round(session, ctx, federation)
    elif isinstance(verdict, Finish):
        _set_state(session, ctx, federation, "finished", verdict.reason)
    elif isinstance(verdict, Fail):
        _set_state(session, ctx, federation, "paused", verdict.reason, verdict.detail)


def _advance_round(session: Session, ctx: Context, federation: Federation, round_: Round) -> None:
    if round_.state != "open":
        return
    rules, now = plan_of(federation.plan).rounds, ctx.clock()
    view = snapshot(session, round_)
    # While paused, time stands still: only "everybody has uploaded" still closes the round.
    verdict = judge_round(view, rules, now if federation.state == "running" else view.opened_at)
    if isinstance(verdict, Aggregate):
        round_.state, round_.closed_at = "aggregating", now
        wake(federation)
    elif isinstance(verdict, Fail):
        fail_round(session, ctx, federation, round_, verdict)


def fail_round(session: Session, ctx: Context, federation: Federation, round_: Round, why: Fail) -> None:
    """The round is over without a model; the federation pauses and says why."""
    round_.state, round_.reason, round_.reason_detail, round_.closed_at = "failed", why.reason, why.detail, ctx.clock()
    record(session, ctx, COORDINATOR, "round.failed", federation.name, round=round_.number, reason=full_reason(round_))
    _set_state(session, ctx, federation, "paused", f"round {round_.number} failed: {why.reason}", why.detail)


def full_reason(row: Federation | Round) -> str:
    """The reason with what only the operator may know."""
    return "; ".join(filter(None, (row.reason, row.reason_detail)))


def _set_state(
    session: Session, ctx: Context, federation: Federation, state: str, reason: str, detail: str = ""
) -> None:
    federation.state, federation.reason, federation.reason_detail = state, reason, detail
    federation.state_since = ctx.clock()
    ctx.touch(federation)
    record(session, ctx, COORDINATOR, f"federation.{state}", federation.name, reason=full_reason(federation))


def _open_round(session: Session, ctx: Context, federation: Federation) -> None:
    plan, half, now = plan_of(federation.plan), half_of(federation.plan), ctx.clock()
    clients = active_clients(session, federation)
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
        deadline_at=now + plan.rounds.deadline_s,
    )
    session.add(round_)
    session.flush()
    ids = {client.name: client.id for client in clients}
    chosen = choose_participants(ids, plan.rounds.sample_fraction, plan.seed, number)
    session.add_all(Participant(round_id=round_.id, client_id=ids[name]) for name in chosen)
    ctx.touch(federation)
