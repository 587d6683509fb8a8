"""A replica that vanishes inside a transaction: others continue, and the server ends its session."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from support.api import SocketApi
from support.databases import new_database
from support.desk import Desk, fedavg_plan
from support.plans import small_plan

from server.service import deadlines
from server.store.database import LOCK, Database, DatabaseOptions
from server.store.postgresql import Timeouts
from server.store.tables import Federation

SHORT = DatabaseOptions(timeouts=Timeouts(lock_s=0.3, idle_in_transaction_s=4.0))
WAITING = 45  # more than there are request threads


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return new_database("postgresql", request, tmp_path)


@pytest.fixture
def db(url: str) -> Iterator[Database]:
    database = Database(url, options=SHORT)
    yield database
    database.close()


@contextmanager
def vanished_replica(url: str, name: str) -> Iterator[Session]:
    """A replica that locks a federation and then hangs; when it wakes up, its commit comes too late."""
    replica = Database(url, options=SHORT)
    with pytest.raises(DBAPIError), replica.write() as session:  # noqa: PT012 - it is the end of the block that raises
        session.execute(select(Federation.id).where(Federation.name == name).with_for_update(**LOCK)).one()
        yield session
    replica.close()


def test_vanished_replica_blocks_only_its_own_federation(url: str) -> None:
    with SocketApi(url, database=SHORT) as api, ThreadPoolExecutor(WAITING) as pool:
        for name in ("stuck", "free"):
            api.create(small_plan(name, method={"name": "fedavg"}))

        def pause(name: str) -> httpx.Response:
            return api.call("POST", f"/v1/federations/{name}/pause")

        with vanished_replica(url, "stuck"):
            waiting = [pool.submit(pause, "stuck") for _ in range(WAITING)]
            assert api.call("GET", "/readyz", token=None).status_code == 200
            assert pause("free").status_code == 200
            answers = [request.result() for request in waiting]
            assert {(answer.status_code, answer.json()["code"]) for answer in answers} == {(503, "database-busy")}
            assert {answer.headers["retry-after"] for answer in answers} == {"5"}
            while (answer := pause("stuck")).status_code == 503:  # until the server ends the session
                assert answer.json()["code"] == "database-busy"
            assert answer.status_code == 200


def test_deadlines_of_other_federations_pass(url: str, db: Database) -> None:
    desks = [Desk(db, fedavg_plan(name, deadline_s=60)) for name in ("stuck", "free")]
    for desk in desks:
        desk.join("north")
        desk.wait(60)
    with vanished_replica(url, "stuck") as session:
        deadlines.enforce_deadlines(desks[0].ctx)
        assert [desk.view.state for desk in desks] == ["running", "paused"]
        session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
    deadlines.enforce_deadlines(desks[0].ctx)
    assert [desk.view.state for desk in desks] == ["paused", "paused"]


def test_every_connection_has_timeouts_unless_the_url_sets_its_own(url: str) -> None:
    names = ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout")

    def settings(address: str) -> list[str]:
        db = Database(address)
        with db.read() as session:
            found = [session.execute(text(f"SHOW {name}")).scalar_one() for name in names]
        db.close()
        return found

    assert settings(url) == ["3s", "30s", "15s"]
    mark = "&" if "?" in url else "?"
    assert settings(f"{url}{mark}options=-c%20lock_timeout%3D7s") == ["7s", "30s", "15s"]


def test_a_snapshot_may_take_longer(db: Database) -> None:
    with db.snapshot() as moment, moment.read() as session:
        assert session.execute(text("SHOW statement_timeout")).scalar_one() == "0"
        assert session.execute(text("SHOW idle_in_transaction_session_timeout")).scalar_one() == "10min"
