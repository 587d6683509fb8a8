"""Deletes federations: hidden at once, then removed row by row in many short transactions.

If that is interrupted, the next command or the cleaning thread of any coordinator process continues.
"""

import threading
from collections.abc import Sequence

from sqlalchemy import ColumnElement, delete, select, tuple_
from sqlalchemy.orm import InstrumentedAttribute

from server.core.errors import Conflict, InvalidInput
from server.service.audit import record_action
from server.service.context import Actor, Context, notify_agents, wake_cleaner
from server.service.queries import load_federation
from server.store import blobs
from server.store.database import BULK_PAUSE_S
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
_ROWS = 200  # per transaction
_Column = InstrumentedAttribute[str] | InstrumentedAttribute[str | None]
# In this order, no row is removed while another still refers to it.
_TENSORS: tuple[tuple[type[Base], tuple[_Column, ...]], ...] = (
    (Transfer, (Transfer.blob_id,)),
    (Personal, (Personal.blob_id,)),
    (Update, (Update.blob_id,)),
    (Model, (Model.blob_id, Model.private_blob_id)),
)
_RECORDS: tuple[type[Base], ...] = (Absence, Participant, Evaluation, Round, Invite, Client)


def delete_federation(ctx: Context, actor: Actor, name: str, confirm: str) -> None:
    """Delete a federation that is not running or paused, with its clients and history. The audit log keeps its name.

    Client tokens and invites become invalid at once, and the name is free again. `finish` does the rest.
    """
    with ctx.db.write() as session:
        federation = load_federation(session, name, lock=True)
        if confirm != name:
            raise InvalidInput("not-confirmed", f"The confirmation is {confirm!r}, not {name!r}; nothing was deleted.")
        if federation.state not in DELETABLE:
            raise Conflict(
                "wrong-state",
                f"Federation {name!r} is {federation.state} and cannot be deleted.",
                next_step=f"Cancel it first: distrans-server federation cancel {name}",
            )
        federation.deleted_at = ctx.clock()
        federation.name = f"{federation.id} (deleted)"  # not a valid name, so it blocks none
        notify_agents(federation)  # ends its clients' long polls
        wake_cleaner(federation)
        record_action(session, ctx, actor, "federation.delete", name, rounds=federation.completed_rounds)


def finish(ctx: Context, stop: threading.Event | None = None) -> int:
    """Remove the remains of deleted federations; return how many are gone. Return early on `stop`."""
    stop, gone = stop or threading.Event(), 0
    with ctx.db.read() as session:
        query = select(Federation.id).where(Federation.deleted_at.is_not(None)).order_by(Federation.id)
        federation_ids = session.execute(query).scalars().all()
    for federation_id in federation_ids:
        for table, columns in _TENSORS:
            while not stop.wait(BULK_PAUSE_S) and _remove_one(ctx, federation_id, table, columns):
                pass
        for table in _RECORDS:
            while not stop.wait(BULK_PAUSE_S) and _remove_some(ctx, federation_id, table):
                pass
        if stop.is_set():
            return gone
        with ctx.db.write() as session:
            session.execute(delete(Federation).where(Federation.id == federation_id))
        gone += 1
    return gone


def _remove_one(ctx: Context, federation_id: int, table: type[Base], columns: Sequence[_Column]) -> bool:
    """Remove one row with its tensors, a few chunks per transaction; return False if there is none."""
    with ctx.db.write() as session:
        keys = table.__mapper__.primary_key
        row = session.execute(select(*keys, *columns).where(_belongs(federation_id, table)).limit(1)).first()
        if row is None:
            return False
        this = [column == value for column, value in zip(keys, row, strict=False)]
        if session.execute(delete(table).where(*this)).rowcount:  # type: ignore[attr-defined]  # else another process was first
            for blob_id in filter(None, row[len(keys) :]):
                blobs.remove_in(session, blob_id)
    return True


def _remove_some(ctx: Context, federation_id: int, table: type[Base]) -> bool:
    """Remove some rows of a table; return False if there are none."""
    columns = table.__mapper__.primary_key
    with ctx.db.write() as session:
        query = select(*columns).where(_belongs(federation_id, table)).limit(_ROWS)
        found = [tuple(row) for row in session.execute(query)]
        if found:
            these = tuple_(*columns).in_(found)
            session.execute(delete(table).where(these).execution_options(synchronize_session=False))
    return bool(found)


def _belongs(federation_id: int, table: type[Base]) -> ColumnElement[bool]:
    """Return the SQL condition that a row belongs to the federation."""
    columns = table.__mapper__.columns
    if "federation_id" in columns:
        return columns["federation_id"] == federation_id
    return columns["round_id"].in_(select(Round.id).where(Round.federation_id == federation_id))
