"""The work of a coordinator with many federations while nothing happens."""

import asyncio
import threading

import pytest
from support.desk import OPERATOR, Desk, fedavg_plan
from support.many_rows import copy_client, copy_federation, statements

from server.http.change_notifier import ChangeNotifier
from server.service import federations, queries, tasks
from server.service.aggregation import Aggregator
from server.service.context import Context, Identity
from server.service.deadlines import enforce_deadlines
from server.service.heartbeats import Heartbeats
from server.store.commit_detector import CommitDetector
from server.store.database import Database
from shared.contract.messages import StatusReport

FEDERATIONS = 1000
CLIENTS = 1000


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


def polls(desk: Desk) -> list[Identity]:
    """Return the active clients, as authenticated."""
    with desk.db.read() as session:
        federation = queries.load_federation(session, desk.name)
        clients = queries.active_clients(session, federation)
        return [Identity(one.id, one.name, federation.id, desk.name, one.token_generation) for one in clients]


@pytest.mark.parametrize("state", ["created", "waiting for sites", "round open", "round done"])
def test_a_poll_reads_the_same_however_many_clients_there_are(clean_db: Database, state: str) -> None:
    """The first one after a change, and those that follow."""
    desk = Desk(clean_db, fedavg_plan(min_clients=2 * CLIENTS if state == "waiting for sites" else 1), start=False)
    north = desk.join("north")
    if state != "created":
        federations.start(desk.ctx, OPERATOR, desk.name)
    if state == "round done":
        desk.run_round({north: 1})
    costs = []
    for copies in (1, CLIENTS - 2):
        copy_client(clean_db, copies, label=f"copy-of-{copies}")
        ctx = Context(clean_db, desk.clock, desk.clock.monotonic)  # another process, which knows nothing
        for _ in range(2):
            with statements(clean_db) as seen:
                tasks.task(ctx, north)
            costs.append(len(seen))
    assert costs[:2] == costs[2:]
    assert costs[1] == 1


def test_polls_of_a_thousand_clients_are_answered_together(clean_db: Database) -> None:
    desk = Desk(clean_db)
    north = desk.join("north")
    copy_client(clean_db, CLIENTS - 1)
    clients = polls(desk)
    tasks.answers(desk.ctx, clients)
    with statements(clean_db) as seen:
        answers = tasks.answers(desk.ctx, clients)
    assert len(seen) == 2
    actions = [told.answer.action for told in answers if isinstance(told, tasks.Told)]
    assert (len(actions), actions.count("train")) == (CLIENTS, 1)
    mine = answers[[client.client_id for client in clients].index(north.client_id)]
    assert mine == tasks.Told(tasks.task(desk.ctx, north))


def test_heartbeats_are_written_together(clean_db: Database) -> None:
    desk = Desk(clean_db)
    desk.join("north")
    copy_client(clean_db, CLIENTS - 1)
    beats, clients = Heartbeats(), polls(desk)
    for number, client in enumerate(clients):
        beats.note(client.client_id, desk.clock(), can_report=number % 2 == 0)
        if number % 4 == 0:
            beats.note_report(client.client_id, desk.clock(), StatusReport(activity="waiting"))
    with statements(clean_db) as seen:
        beats.flush(desk.ctx)
    assert len(seen) <= 8, seen


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
