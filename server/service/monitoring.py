"""Numbers about the whole coordinator, for monitoring."""

from collections.abc import Collection
from dataclasses import dataclass, field

from sqlalchemy import CompoundSelect, func, select, union
from sqlalchemy.orm import Session

from server.service.context import Context
from server.store.tables import Blob, Client, Federation, Model, Personal, Round, Transfer, Update


@dataclass
class FederationStatus:
    """One federation's numbers."""

    name: str
    state: str
    rounds_done: int
    best_accuracy: float | None
    clients: dict[str, int] = field(default_factory=dict)  # by state
    rounds: dict[str, int] = field(default_factory=dict)  # by state
    updates: int = 0
    silent_s: dict[str, float] = field(default_factory=dict)  # seconds since each active client was last heard


@dataclass(frozen=True)
class Status:
    """The numbers of all federations, and the bytes of all tensors."""

    federations: Collection[FederationStatus]
    blob_bytes: float


def stored_bytes(session: Session, federation_id: int) -> int:
    """Return the bytes of all tensors stored for a federation."""
    rounds = select(Round.id).where(Round.federation_id == federation_id)
    used: CompoundSelect[tuple[str | None]] = union(
        select(Model.blob_id).where(Model.federation_id == federation_id),
        select(Model.private_blob_id).where(Model.federation_id == federation_id),
        select(Personal.blob_id).where(Personal.federation_id == federation_id),
        select(Update.blob_id).where(Update.round_id.in_(rounds), Update.blob_id.is_not(None)),  # few have bytes left
        select(Transfer.blob_id).where(Transfer.round_id.in_(rounds)),
    )
    total = select(func.coalesce(func.sum(Blob.size_bytes), 0)).where(Blob.id.in_(used))
    return int(session.execute(total).scalar_one())


def status(ctx: Context) -> Status:
    """Return the coordinator's numbers; the same on every replica, because they come from the database."""
    with ctx.db.read() as session:
        found = _federations(session)
        unknown = FederationStatus("", "", 0, None)  # collects rows of federations deleted or created just now
        clients = select(Client.federation_id, Client.state, func.count()).group_by(Client.federation_id, Client.state)
        for federation_id, state, number in session.execute(clients):
            found.get(federation_id, unknown).clients[state] = number
        seen = select(Client.federation_id, Client.name, Client.last_seen_at).where(Client.state == "active")
        now = ctx.clock()
        for federation_id, name, last_seen_at in session.execute(seen):
            found.get(federation_id, unknown).silent_s[name] = max(0.0, now - last_seen_at)
        rounds = select(Round.federation_id, Round.state, func.count()).group_by(Round.federation_id, Round.state)
        for federation_id, state, number in session.execute(rounds):
            found.get(federation_id, unknown).rounds[state] = number
        updates = select(Round.federation_id, func.count()).join(Update, Update.round_id == Round.id)
        for federation_id, number in session.execute(updates.group_by(Round.federation_id)):
            found.get(federation_id, unknown).updates = number
        size = session.execute(select(func.coalesce(func.sum(Blob.size_bytes), 0))).scalar_one()
    return Status(found.values(), float(size))


def _federations(session: Session) -> dict[int, FederationStatus]:
    columns = (  # not the plans, which are large
        Federation.id,
        Federation.name,
        Federation.state,
        Federation.completed_rounds,
        Federation.best_accuracy,
    )
    rows = session.execute(select(*columns).where(Federation.deleted_at.is_(None)))
    return {row.id: FederationStatus(row.name, row.state, row.completed_rounds, row.best_accuracy) for row in rows}
