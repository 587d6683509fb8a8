"""Reads in the event loop see every commit, and leave everything that could wait to a thread."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import bindparam, select, update

from server.store.database import Database
from server.store.schema import upgrade
from server.store.tables import CoordinatorClock

UPTIME = select(CoordinatorClock.uptime).where(CoordinatorClock.id == bindparam("id"))


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    db = Database(f"sqlite:///{tmp_path / 'clock.db'}")
    upgrade(db)
    yield db
    db.close()


def set_uptime(db: Database, seconds: float) -> None:
    with db.write() as session:
        session.execute(update(CoordinatorClock).values(uptime=seconds))


def test_a_read_sees_what_anybody_committed_before_it(db: Database) -> None:
    other = Database(db.url.render_as_string())
    for seconds, writer in ((1.0, db), (2.0, other), (3.0, db)):
        set_uptime(writer, seconds)
        assert db.quick.rows(UPTIME, {"id": 1}) == [(seconds,)]
    assert db.quick.rows(UPTIME, {"id": 2}) == []
    other.close()


def test_a_read_does_not_wait_for_a_writer(db: Database) -> None:
    set_uptime(db, 1.0)
    with db.write() as session:
        session.execute(update(CoordinatorClock).values(uptime=2.0))
        assert db.quick.rows(UPTIME, {"id": 1}) == [(1.0,)]


def test_a_read_that_fails_is_left_to_a_thread(db: Database) -> None:
    with db.migration() as connection:
        connection.exec_driver_sql("ALTER TABLE clock RENAME TO clocks")
    assert db.quick.rows(UPTIME, {"id": 1}) is None
