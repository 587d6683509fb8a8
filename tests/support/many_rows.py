"""Thousands of federations and rounds, copied quickly from a real one; and a record of the SQL that runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event, insert, select

from server.store.database import Database
from server.store.tables import Base, Client, Evaluation, Federation, Model, Participant, Round, Update

_FIRST = 1_000_000  # first id of the copies


def copy_federation(db: Database, copies: int) -> None:
    """Copy the only federation, of at most one round, with its clients and models but without updates."""
    with db.write() as session:
        for table in (Federation, Client, Model, Round, Participant):
            rows = session.execute(select(table.__table__)).mappings().all()
            if rows:
                values = [_copied(table, dict(row), number) for number in range(copies) for row in rows]
                session.execute(insert(table), values)


def _copied(table: type[Base], row: dict[str, Any], number: int) -> dict[str, Any]:
    for column in ("federation_id", "round_id"):
        if column in row:
            row[column] = _FIRST + number
    if "client_id" in row:
        row["client_id"] = f"{number}-{row['client_id']}"[:32]
    if table is Client:
        row["id"] = f"{number}-{row['id']}"[:32]
    if table in (Federation, Round):
        row["id"] = _FIRST + number
    if table is Federation:
        row["name"] += f"-{number}"
    return row


def copy_client(db: Database, copies: int, label: str = "copy") -> None:
    """Copy the client called north within its federation; no round has chosen the copies."""
    with db.write() as session:
        row = dict(session.execute(select(Client.__table__).where(Client.name == "north")).mappings().one())
        names = [f"{label}-{number}" for number in range(copies)]
        session.execute(insert(Client), [{**row, "id": name.replace("-", ""), "name": name} for name in names])


def copy_round(db: Database, number: int, copies: int) -> None:
    """Copy a finished round, with its updates and evaluations, to rounds with new numbers."""
    with db.write() as session:
        (round_,) = session.execute(select(Round.__table__).where(Round.number == number)).mappings().all()
        updates = session.execute(select(Update.__table__).where(Update.round_id == round_["id"])).mappings().all()
        tests = select(Evaluation.__table__).where(Evaluation.model_number == number)
        evaluations = session.execute(tests).mappings().all()
        new = range(_FIRST, _FIRST + copies)
        session.execute(insert(Round), [{**round_, "id": at, "number": at} for at in new])
        session.execute(insert(Update), [{**row, "round_id": at, "blob_id": None} for at in new for row in updates])
        session.execute(insert(Evaluation), [{**row, "model_number": at} for at in new for row in evaluations])


@contextmanager
def statements(db: Database) -> Iterator[list[str]]:
    """Yield a list that collects the SQL statements this process runs on the database, in order."""
    seen: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if not statement.startswith(("BEGIN", "PRAGMA")):
            seen.append(statement)

    event.listen(db.engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(db.engine, "before_cursor_execute", note)
