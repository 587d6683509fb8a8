"""How soon waiting agents are woken: by a commit, not by the next look at the database."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import psycopg
import pytest
from support.desk import OPERATOR, Desk, fedavg_plan
from support.waiting import eventually

from server.http.change_notifier import ChangeNotifier
from server.service import federations, queries
from server.service.context import Context, notify_agents
from server.store.changes import ChangeListener
from server.store.database import Database

NEVER_S = 3600.0  # between two looks at the database


def url_of(db: Database) -> str:
    return db.url.render_as_string(hide_password=False)


@asynccontextmanager
async def watching(db: Database) -> AsyncIterator[ChangeNotifier]:
    """Yield a notifier that knows the current versions."""
    notifier = ChangeNotifier(db, NEVER_S)
    notifier.start(asyncio.get_running_loop())
    try:
        yield notifier
    finally:
        notifier.close()
        await asyncio.to_thread(notifier.stop)


async def is_woken_by(db: Database, name: str, step: Callable[[], None]) -> bool:
    with db.read() as session:
        federation_id = queries.load_federation(session, name).id
    async with watching(db) as notifier:
        known = notifier.waiter(federation_id)
        db.change_committed.set()  # the first look has nothing to compare with, and wakes everybody
        await asyncio.wait_for(known, 60)
        waiting = notifier.waiter(federation_id)
        await asyncio.to_thread(step)
        done, _ = await asyncio.wait({waiting}, timeout=60)
        return bool(done)


def test_a_commit_of_this_process_wakes_at_once(clean_db: Database) -> None:
    desk = Desk(clean_db, fedavg_plan())
    assert asyncio.run(is_woken_by(clean_db, desk.name, lambda: federations.pause(desk.ctx, OPERATOR, desk.name)))


def test_what_is_rolled_back_announces_nothing(clean_db: Database) -> None:
    desk = Desk(clean_db, fedavg_plan())
    clean_db.change_committed.clear()
    with pytest.raises(ZeroDivisionError), clean_db.write() as session:  # noqa: PT012 - the error ends the block
        federation = queries.load_federation(session, desk.name)
        notify_agents(federation)
        raise ZeroDivisionError
    assert not clean_db.change_committed.is_set()


@pytest.mark.parametrize("clean_db", ["postgresql"], indirect=True)
def test_a_commit_of_another_replica_wakes_at_once(clean_db: Database) -> None:
    desk, elsewhere = Desk(clean_db, fedavg_plan()), Database(url_of(clean_db))

    def pause() -> None:
        federations.pause(Context(elsewhere), OPERATOR, desk.name)

    assert asyncio.run(is_woken_by(clean_db, desk.name, pause))
    elsewhere.close()


def listeners(db: Database) -> set[int]:
    """Return the server processes of connections that listen."""
    query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN %'"
    with psycopg.connect(url_of(db).replace("+psycopg", "")) as connection:
        return {row[0] for row in connection.execute(query)}


@pytest.mark.parametrize("clean_db", ["postgresql"], indirect=True)
def test_a_listener_whose_connection_broke_connects_again(clean_db: Database) -> None:
    """Whatever was announced meanwhile counts as announced now."""
    listener = ChangeListener(clean_db)
    listener.start()
    eventually(lambda: listener.is_listening)
    (broken,) = listeners(clean_db)
    clean_db.change_committed.clear()
    with psycopg.connect(url_of(clean_db).replace("+psycopg", "")) as connection:
        connection.execute("SELECT pg_terminate_backend(%s)", [broken])
    assert clean_db.change_committed.wait(60)
    assert listeners(clean_db).isdisjoint({broken})
    listener.stop()
    assert not listener.is_listening
    eventually(lambda: not listeners(clean_db))
