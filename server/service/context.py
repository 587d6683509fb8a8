"""What every use case needs: the database, the clock, and a way to wake who waits."""

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from sqlalchemy.orm import Session, object_session

from server.store.session import Database, add_last, after_commit
from server.store.tables import AuditEntry, Client, Federation
from shared.methods import server_half
from shared.methods.base import ClientRecord, Facts, ServerHalf
from shared.plan import FederationPlan, read_stored_plan
from shared.wire import Spec


@dataclass(frozen=True)
class Actor:
    """Who asks, and from where; goes into the audit log."""

    name: str
    address: str = ""


@dataclass(frozen=True)
class Context:
    """One process of the coordinator."""

    db: Database
    clock: Callable[[], float] = time.time  # for what people read; nothing is judged by it
    monotonic: Callable[[], float] = time.monotonic  # counts the uptime
    process_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @staticmethod
    def touch(federation: Federation) -> None:
        """Agents should look again: long polls of this federation, on every replica, end once this is committed."""
        federation.version += 1
        wake(federation)


def wake(federation: Federation) -> None:
    """The background worker of this process should look, once this is committed."""
    session = object_session(federation)
    if session is not None:
        after_commit(session, lambda db: db.work.set())


def record(session: Session, ctx: Context, actor: Actor, action: str, federation: str = "", **detail: object) -> None:
    """Add a line to the audit log, in the caller's transaction; ids grow in the order of the commits."""
    add_last(
        session,
        AuditEntry(
            at=ctx.clock(),
            actor=actor.name,
            action=action,
            federation=federation,
            address=actor.address,
            detail=json.dumps(detail, sort_keys=True) if detail else "",
        ),
    )


@lru_cache(maxsize=64)
def plan_of(plan_json: str) -> FederationPlan:
    """A stored plan; plans never change."""
    return read_stored_plan(plan_json)


@lru_cache(maxsize=64)
def half_of(plan_json: str) -> ServerHalf:
    """The server half of a stored plan's method; halves hold nothing but caches."""
    return server_half(plan_of(plan_json))


@lru_cache(maxsize=64)
def update_spec(plan_json: str, facts_json: str) -> Spec:
    """What an update of a round with these facts must look like."""
    return half_of(plan_json).update_spec(facts_of(facts_json))


def facts_of(facts_json: str) -> Facts:
    """The facts of a round as they are stored."""
    return dict(json.loads(facts_json))


def client_record(client: Client) -> ClientRecord:
    """What a method may know of a client. Its name is its id there: a rerun with the same names gives the same bits."""
    return ClientRecord(client.name, tuple(json.loads(client.class_counts)))


def dump_roster(roster: list[ClientRecord]) -> str:
    """A roster as it is stored with its round."""
    return json.dumps([[client.id, list(client.class_counts)] for client in roster], separators=(",", ":"))


def load_roster(text: str) -> list[ClientRecord]:
    """A stored roster."""
    return [ClientRecord(client_id, tuple(counts)) for client_id, counts in json.loads(text)]
