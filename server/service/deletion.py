"""Deleting a federation: it disappears at once, its rows and tensors go in many short transactions.

Whoever is interrupted leaves the rest to the next: the command line, or the cleaning thread of any coordinator process.
"""

import threading
from collections.abc import Sequence

from sqlalchemy import ColumnElement, delete, select, tuple_
from sqlalchemy.orm import InstrumentedAttribute

from server.core.errors import Conflict, InvalidInput
from server.service.context import Actor, Context, record
from server.service.federations import load
from server.store import blobs
from server.store.tables import (
    Absence,
    Base,
    Client,
    Evaluation,
    Federation,
    Invite,
    Model,
    Participant,
    Personal,
    Round,
    Transfer,
    Update,
)

DELETABLE = ("created", "finished", "cancelled")
_ROWS = 200  # removed in one transaction
_PAUSE_S = 0.002  # between two transactions: a writer that waits gets its turn
_Column = InstrumentedAttribute[str] | InstrumentedAttribute[str | None]
# In this order no row is removed that another one still refers to.
_TENSORS: tuple[tuple[type[Base], tuple[_Column, ...]], ...] = (
    (Transfer, (Transfer.blob_id,)),
    (Personal, (Personal.blob_id,)),
    (Update, (Update.blob_id,)),
    (Model, (Model.blob_id, Model.private_blob_id)),
)
_RECORDS: tuple[type[Base], ...] = (Absence, Participant, Evaluation, Round, Invite, Client)


def delete_federation(ctx: Context, actor: Actor, name: str, confirm: str) -> None:
    """Delete a federation that is not under way, with its clients and its history; the audit log keeps its name.

    Its clients' tokens and its invites end with the transaction, and its name is free again. `finish` does the rest.
    """
    with ctx.db.write() as session:
        federation = load(session, name, lock=True)
        if confirm != name:
            raise InvalidInput(
                "not-confirmed", f"The confirmation is {confirm!r}, not {name!r}.", next_step="Nothing was deleted."
            )
        if federation.state not in DELETABLE:
            raise Conflict(
                "wrong-state",
                f"Federation {name!r} is {federation.state} and cannot be deleted.",
                next_step=f"End it first: distrans-server federation cancel {name}",
            )
        federation.deleted_at = ctx.clock()
        federation.name = f"{federation.id} (deleted)"  # not a valid name, so it takes nobody's
        ctx.touch(federation)  # long polls of its clients end
        record(session, ctx, actor, "federation.delete", name, rounds=federation.completed_rounds)


def finish(ctx: Context, stop: threading.Event | None = None) -> int:
    """Remove what is left of deleted federations; the number of federations that are gone. Returns early on `stop`."""
    stop, gone = stop or threading.Event(), 0
    with ctx.db.read() as session:
        query = select(Federation.id).where(Federation.deleted_at.is_not(None)).order_by(Federation.id)
        federation_ids = session.execute(query).scalars().all()
    for federation_id in federation_ids:
        for table, columns in _TENSORS:
            while not stop.wait(_PAUSE_S) and _remove_one(ctx, federation_id, table, columns):
                pass
        for table in _RECORDS:
            while not stop.wait(_PAUSE_S) and _remove_some(ctx, federation_id, table):
                pass
        if stop.is_set():
            return gone
        with ctx.db.write() as session:
            session.execute(delete(Federation).where(Federation.id == federation_id))
        gone += 1
    return gone


def _remove_one(ctx: Context, federation_id: int, table: type[Base], columns: Sequence[_Column]) -> bool:
    """Remove one row with its tensors, of which a few chunks go per transaction; False when there is none."""
    with ctx.db.write() as session:
        keys = table.__mapper__.primary_key
        row = session.execute(select(*keys, *columns).where(_belongs(federation_id, table)).limit(1)).first()
        if row is None:
            return False
        this = [column == value for column, value in zip(keys, row, strict=False)]
        if session.execute(delete(table).where(*this)).rowcount:  # type: ignore[attr-defined]  # else another was first
            for blob_id in filter(None, row[len(keys) :]):
                blobs.drop(session, blob_id)
    return True


def _remove_some(ctx: Context, federation_id: int, table: type[Base]) -> bool:
    """Remove rows of a table; False when there is none."""
    columns = table.__mapper__.primary_key
    with ctx.db.write() as session:
        query = select(*columns).where(_belongs(federation_id, table)).limit(_ROWS)
        found = [tuple(row) for row in session.execute(query)]
        if found:
            these = tuple_(*columns).in_(found)
            session.execute(delete(table).where(these).execution_options(synchronize_session=False))
    return bool(found)


def _belongs(federation_id: int, table: type[Base]) -> ColumnElement[bool]:
    """The condition that a row is a federation's."""
    columns = table.__mapper__.columns
    if "federation_id" in columns:
        return columns["federation_id"] == federation_id
    return columns["round_id"].in_(select(Round.id).where(Round.federation_id == federation_id))
