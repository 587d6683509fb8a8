"""Lookups that several use cases share. They read and never write."""

import json
from collections.abc import Collection
from dataclasses import replace

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from server.core.errors import NotAllowed, NotFound
from server.core.lifecycle import UNDER_WAY
from server.service.context import Identity, round_context, server_half_of
from server.store.database import Database
from server.store.tables import Client, Federation, Model, Participant, Round
from shared.contract.class_totals import class_totals_fact
from shared.contract.suggestions import did_you_mean
from shared.learning.methods.base import ClientRecord, RoundContext

_MAX_NAMED = 500  # beyond this many ids, reading every federation's version is faster than naming them


def load_federation(session: Session, name: str, *, lock: bool = False) -> Federation:
    """Return the federation with this name; `lock` holds its row until the transaction ends."""
    query = select(Federation).where(Federation.name == name, Federation.deleted_at.is_(None))
    federation = session.execute(query.with_for_update(key_share=True) if lock else query).scalar_one_or_none()
    if federation is None:
        # Suggesting names is safe: clients can only ask about their own federation.
        names = session.execute(select(Federation.name).where(Federation.deleted_at.is_(None))).scalars()
        near = did_you_mean(name, names) or "."
        raise NotFound("no-such-federation", f"There is no federation {name!r}{near}")
    return federation


def find_client_id(session: Session, federation: Federation, client: str) -> str:
    """Return the id of the client with this name or id; of several, the active or most recent one."""
    query = select(Client).where(Client.federation_id == federation.id)
    rows = session.execute(query.where((Client.id == client) | (Client.name == client))).scalars().all()
    if not rows:
        near = did_you_mean(client, [row.name for row in session.execute(query).scalars()]) or "."
        raise NotFound("no-such-client", f"Federation {federation.name!r} has no client {client!r}{near}")
    return min(rows, key=lambda row: (row.state != "active", -row.joined_at)).id


def active_clients(session: Session, federation: Federation) -> list[Client]:
    """Return the active clients sorted by name in Python: collations differ, and results must be reproducible."""
    query = select(Client).where(Client.federation_id == federation.id, Client.state == "active")
    return sorted(session.execute(query).scalars(), key=lambda client: client.name)


def latest_model(session: Session, federation: Federation) -> Model:
    """Return the newest global model."""
    query = select(Model).where(Model.federation_id == federation.id).order_by(Model.number.desc()).limit(1)
    return session.execute(query).scalar_one()


def base_of(session: Session, federation: Federation, number: int) -> int | None:
    """Return the model that the round behind this model started from; None for θ⁰ and an imported model."""
    query = select(Round.base_model).where(Round.federation_id == federation.id, Round.number == number)
    return session.execute(query.where(Round.state == "done")).scalar_one_or_none()


def ancestry(session: Session, federation: Federation, number: int) -> list[int]:
    """Return a model and those that it came from, newest first."""
    rounds = select(Round.number, Round.base_model).where(Round.federation_id == federation.id, Round.state == "done")
    bases = {row.number: row.base_model for row in session.execute(rounds)}
    line = [number]
    while line[-1] in bases:
        line.append(bases[line[-1]])
    return line


def round_under_way(session: Session, federation: Federation) -> Round | None:
    """Return the round that is open or aggregating. There is at most one."""
    query = select(Round).where(Round.federation_id == federation.id, Round.state.in_(UNDER_WAY))
    return session.execute(query).scalar_one_or_none()


def next_number(session: Session, federation: Federation) -> int:
    """Return the number of the next round and its model. An imported federation lacks its old rounds."""
    last_round = select(func.max(Round.number)).where(Round.federation_id == federation.id)
    return max(session.execute(last_round).scalar() or 0, latest_model(session, federation).number) + 1


def round_of(session: Session, identity: Identity, round_id: int) -> Round:
    """Return a round this client participates in."""
    round_ = session.get(Round, round_id)
    if round_ is None or round_.federation_id != identity.federation_id:
        raise NotFound(
            "no-such-round", f"There is no round {round_id}.", next_step="GET /v1/task returns the open round."
        )
    if session.get(Participant, (round_id, identity.client_id)) is None:
        raise NotAllowed("not-a-participant", f"This client was not chosen for round {round_.number}.")
    return round_


def serving_context(session: Session, federation: Federation) -> RoundContext:
    """Return the context of the last round that produced a model, or, before that, the current one."""
    query = select(Round).where(Round.federation_id == federation.id, Round.state == "done")
    last = session.execute(query.order_by(Round.number.desc()).limit(1)).scalar_one_or_none()
    if last is not None:
        context = round_context(last)
        # Rounds of older releases have no class totals, but the counts they come from.
        totals = class_totals_fact(client.class_counts for client in context.roster)
        return replace(context, facts=totals | context.facts)
    clients = select(Client.name, Client.class_counts)  # not whole rows: agents ask for this while they wait
    active = session.execute(clients.where(Client.federation_id == federation.id, Client.state == "active"))
    roster = [ClientRecord(name, tuple(json.loads(counts))) for name, counts in sorted(tuple(row) for row in active)]
    facts = server_half_of(federation.plan).facts(roster) if roster else {}  # no data, no heterogeneity
    return RoundContext(roster, facts)


def federation_versions(db: Database, federation_ids: Collection[int]) -> dict[int, int]:
    """Return the version of each of these federations that still exists; may include others."""
    query = select(Federation.id, Federation.version)
    if len(federation_ids) <= _MAX_NAMED:
        query = query.where(Federation.id.in_(federation_ids))
    with db.read() as session:
        return {row.id: row.version for row in session.execute(query)}
