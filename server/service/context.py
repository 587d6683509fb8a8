"""What every use case needs: database, clock, audit log, wake-up calls, and readers for stored JSON."""

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from sqlalchemy.orm import object_session

from server.service.answer_cache import AnswerCache
from server.store.changes import announce_change
from server.store.database import Database, after_commit
from server.store.tables import Client, Federation, Round
from shared.contract.plan import FederationPlan, read_stored_plan
from shared.learning.methods import server_half
from shared.learning.methods.base import ClientRecord, Facts, RoundContext, ServerHalf


@dataclass(frozen=True)
class Actor:
    """Who is asking, and from where; for the audit log."""

    name: str
    address: str = ""


@dataclass(frozen=True)
class Identity:
    """An authenticated client."""

    client_id: str
    name: str
    federation_id: int
    federation: str
    token_generation: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True)
class Context:
    """One process of the coordinator."""

    db: Database
    clock: Callable[[], float] = time.time  # for people, invite expiry and changes per hour; never for deadlines
    monotonic: Callable[[], float] = time.monotonic  # counts uptime
    process_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    answers: AnswerCache = field(default_factory=AnswerCache, compare=False, repr=False)


def notify_agents(federation: Federation) -> None:
    """End all long polls of this federation, on every replica, once this is committed; wake the worker as well."""
    federation.version += 1
    if session := object_session(federation):
        announce_change(session)
    wake_aggregator(federation)


def wake_aggregator(federation: Federation) -> None:
    """Wake the thread that runs `Aggregator.step` once this is committed."""
    session = object_session(federation)
    if session is not None:
        after_commit(session, lambda db: db.work_available.set())


def wake_cleaner(federation: Federation) -> None:
    """Wake the thread that runs `Cleaner.clean` once this is committed."""
    session = object_session(federation)
    if session is not None:
        after_commit(session, lambda db: db.removal_due.set())


@lru_cache(maxsize=64)
def plan_of(plan_json: str) -> FederationPlan:
    """Parse a stored plan. Plans never change."""
    return read_stored_plan(plan_json)


@lru_cache(maxsize=64)
def server_half_of(plan_json: str) -> ServerHalf:
    """Return the server half of a stored plan's method. Halves hold nothing but caches."""
    return server_half(plan_of(plan_json))


def facts_of(facts_json: str) -> Facts:
    """Parse the stored facts of a round."""
    return dict(json.loads(facts_json))


def round_context(round_: Round) -> RoundContext:
    """Return the roster and facts that were frozen when a round opened."""
    roster = [ClientRecord(client_id, tuple(counts)) for client_id, counts in json.loads(round_.roster)]
    return RoundContext(roster, facts_of(round_.facts))


def dump_context(context: RoundContext) -> dict[str, str]:
    """Return the columns of a `Round` that store its context."""
    roster = [[client.id, list(client.class_counts)] for client in context.roster]
    return {
        "facts": json.dumps(context.facts, sort_keys=True),
        "roster": json.dumps(roster, separators=(",", ":")),
    }


def client_record(client: Client) -> ClientRecord:
    """Return what a method may know about a client. Names serve as ids, so a rerun with the same names is bit-equal."""
    return ClientRecord(client.name, tuple(json.loads(client.class_counts)))
