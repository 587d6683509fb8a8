"""The work of a coordinator with many federations while nothing happens."""

import asyncio
import threading

import pytest
from support.desk import OPERATOR, Desk, fedavg_plan
from support.many_rows import copy_federation, statements

from server.http.change_notifier import ChangeNotifier
from server.service import federations, queries
from server.service.aggregation import Aggregator
from server.service.deadlines import enforce_deadlines
from server.store.commit_detector import CommitDetector
from server.store.database import Database

FEDERATIONS = 1000


@pytest.fixture(params=["waiting for sites", "round open"])
def desk(clean_db: Database, request: pytest.FixtureRequest) -> Desk:
    """Thousands of running federations, all waiting."""
    desk = Desk(clean_db, fedavg_plan(min_clients=1 if request.param == "round open" else 2))
    desk.join("north")
    copy_federation(clean_db, FEDERATIONS - 1)
    return desk


def test_deadlines_are_looked_for_without_asking_about_every_federation(desk: Desk) -> None:
    with statements(desk.db) as seen:
        enforce_deadlines(desk.ctx)
    assert len(seen) <= 4, seen[:10]


def test_updates_are_looked_for_without_asking_about_every_round(desk: Desk) -> None:
    aggregator = Aggregator(desk.ctx)
    with statements(desk.db) as seen:
        assert not aggregator.step()
    assert len(seen) == 1, seen[:10]


def test_updates_that_are_folded_already_are_not_asked_for_again(clean_db: Database) -> None:
    desk = Desk(clean_db, fedavg_plan(min_clients=2))
    north = desk.join("north")
    desk.join("south")
    desk.upload(north, 1)
    aggregator = Aggregator(desk.ctx)
    assert aggregator.step()
    with statements(clean_db) as seen:
        assert not aggregator.step()
    assert len(seen) == 1, seen


@pytest.mark.parametrize("desk", ["waiting for sites"], indirect=True)
def test_the_watcher_reads_no_versions_until_something_is_committed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change wakes those who wait for that federation, and nobody else."""
    looks, many = 0, threading.Event()
    marker = CommitDetector.marker

    def counted(changes: CommitDetector) -> str:
        nonlocal looks
        looks += 1
        if looks >= 20:
            many.set()
        return marker(changes)

    monkeypatch.setattr(CommitDetector, "marker", counted)
    with desk.db.read() as session:
        mine = queries.load_federation(session, desk.name).id
        other = queries.load_federation(session, f"{desk.name}-7").id

    async def watch() -> list[str]:
        news = ChangeNotifier(desk.db, 0.001)
        news.start(asyncio.get_running_loop())
        first = [news.waiter(mine), news.waiter(other)]  # the first check has nothing to compare with, and wakes both
        await asyncio.wait(first, timeout=60)
        waiting, others = news.waiter(mine), news.waiter(other)
        many.clear()
        with statements(desk.db) as seen:
            await asyncio.to_thread(many.wait, 60)
            idle = [statement for statement in seen if "federations" in statement]
        assert not waiting.done()
        await asyncio.to_thread(federations.pause, desk.ctx, OPERATOR, desk.name)
        await asyncio.wait({waiting}, timeout=60)
        assert waiting.done()
        assert not others.done()
        news.close()
        await asyncio.to_thread(news.stop)
        return idle

    assert len(asyncio.run(watch())) <= 1  # PostgreSQL's own background work commits now and then


def test_the_marker_changes_with_every_commit_of_anybody(clean_db: Database) -> None:
    changes, other = CommitDetector(clean_db), Database(clean_db.url.render_as_string(hide_password=False))
    for db in (clean_db, other):
        before = changes.marker()
        Desk(db, fedavg_plan(f"by-{id(db)}"))
        assert changes.marker() != before
    changes.close()
    other.close()


def test_the_marker_stays_while_everybody_only_reads(clean_db: Database) -> None:
    Desk(clean_db)
    changes = CommitDetector(clean_db)

    def is_steady() -> bool:
        before = changes.marker()
        with clean_db.read() as session:
            queries.load_federation(session, "pets")
        return changes.marker() == before

    assert any(is_steady() for _ in range(10))  # PostgreSQL's own background work commits now and then
    changes.close()
