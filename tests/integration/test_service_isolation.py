"""A federation with broken stored data affects no other; neither does a failing job or replica."""

import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import OperationalError
from support.api import open_api
from support.crashes import InterruptibleAggregator, at
from support.desk import Clock, Desk, aggregate_until_idle, fedavg_plan
from support.plans import update_body

from server.core.lifecycle import Fail
from server.http import background as worker_module
from server.http.background import BackgroundJobs
from server.service import audit, deadlines, federations
from server.service.aggregation import LEASE_S, Aggregator
from server.service.context import Context
from server.service.heartbeats import Heartbeats
from server.service.isolation import FAILURES_BEFORE_PAUSE, FailureIsolation
from server.service.retention import Retention
from server.store.database import Database
from server.store.tables import BlobChunk, Client, Federation, Update

REASON = f"the coordinator failed to process it {FAILURES_BEFORE_PAUSE} times in a row"


def break_plan(db: Database, name: str) -> None:
    """Break the stored plan, as a damaged disk or a bug could: nothing that needs it works anymore."""
    with db.write() as session:
        session.execute(update(Federation).where(Federation.name == name).values(plan='{"name": "torn'))


def state_of(db: Database, name: str) -> tuple[str, str]:
    with db.read() as session:
        row = session.execute(select(Federation).where(Federation.name == name)).scalar_one()
        return row.state, row.reason


class TestFailure:
    @pytest.fixture
    def desks(self, clean_db: Database) -> list[Desk]:
        clock = Clock()
        return [Desk(clean_db, fedavg_plan(name), clock) for name in ("bad", "good")]

    def test_of_one_federation_does_not_keep_the_others_waiting(self, desks: list[Desk]) -> None:
        bad, good = desks
        for desk in desks:
            desk.join("north")
        break_plan(bad.db, "bad")
        good.let_pass(60)
        assert (state_of(bad.db, "bad")[0], good.view.state) == ("running", "paused")

    def test_again_and_again_pauses_it_with_the_reason(self, desks: list[Desk]) -> None:
        bad = desks[0]
        bad.join("north")
        break_plan(bad.db, "bad")
        isolation = FailureIsolation(bad.ctx)
        bad.wait(60)
        for number in range(FAILURES_BEFORE_PAUSE):
            assert state_of(bad.db, "bad") == ("running", ""), number
            deadlines.enforce_deadlines(bad.ctx, isolation)
        assert state_of(bad.db, "bad") == ("paused", REASON)
        (entry,) = [entry for entry in audit.entries(bad.ctx, federation="bad") if entry.action == "federation.paused"]
        assert entry.actor == "coordinator"
        assert "ValidationError" in entry.detail

    def test_is_shown_in_the_list(self, desks: list[Desk]) -> None:
        break_plan(desks[0].db, "bad")
        bad, good = federations.list_all(desks[0].ctx)
        assert (bad.name, bad.state, good.name, good.rounds_total) == ("bad", "running", "good", 5)
        assert bad.reason.startswith("its stored data cannot be read: ValidationError")

    def test_during_aggregation_fails_that_round_alone(self, desks: list[Desk]) -> None:
        for seed, desk in enumerate(desks):
            desk.upload(desk.join("north"), seed)
        break_plan(desks[0].db, "bad")
        aggregate_until_idle(Aggregator(desks[0].ctx))
        assert desks[1].view.rounds_done == 1
        assert state_of(desks[0].db, "bad") == ("paused", "round 1 failed: aggregation failed")

    def test_of_the_storage_is_no_federations_fault(self, desks: list[Desk], monkeypatch: pytest.MonkeyPatch) -> None:
        good = desks[1]
        good.join("north")
        good.wait(60)
        isolation = FailureIsolation(good.ctx)

        def away(*_: object) -> None:
            raise OperationalError("SELECT 1", {}, Exception("the server closed the connection"))

        with monkeypatch.context() as patch:
            patch.setattr(deadlines, "advance", away)
            for _ in range(2 * FAILURES_BEFORE_PAUSE):
                deadlines.enforce_deadlines(good.ctx, isolation)
        assert good.view.state == "running"


def test_over_the_api_the_others_go_on(sqlite_url: str) -> None:
    """With the real background threads, the broken one is paused and the other finishes."""
    plans = [fedavg_plan(name, count=1) for name in ("bad", "good")]
    with open_api(sqlite_url) as api:
        db = api.app.state.ctx.db
        for plan in plans:
            api.create(plan)
        _, site = (api.join(plan, "north", {"cat": 1}) for plan in plans)
        break_plan(db, "bad")
        with db.write() as session:
            session.execute(update(Federation).where(Federation.name == "bad").values(due_uptime=-1.0))
        task = site.task()
        assert task.round is not None
        assert site.put(task.round.id, update_body(plans[1], {}, 1)).status_code == 200
        while site.task(wait_s=1, after=task.ticket).action != "finished" or state_of(db, "bad")[0] != "paused":
            pass
        views = api.admin("GET", "/v1/federations")
        assert [(view["name"], view["state"]) for view in views] == [("bad", "paused"), ("good", "finished")]


def test_a_stalled_replica_does_not_fail_a_round_that_another_one_is_finishing(clean_db: Database) -> None:
    desk = Desk(clean_db)
    desk.upload(desk.join("north"), 1)

    def stall() -> None:
        desk.wait(LEASE_S + 1)
        aggregate_until_idle(other)

    def fail_meanwhile() -> None:
        stalled._fail(desk.round.id, Fail("aggregation failed"))
        assert desk.round.state == "aggregating"

    stalled = InterruptibleAggregator(Context(clean_db, desk.clock), at("before-store", stall))
    other = InterruptibleAggregator(Context(clean_db, desk.clock), at("before-publish", fail_meanwhile))
    aggregate_until_idle(stalled)
    assert (desk.view.state, desk.view.rounds_done) == ("running", 1)
    assert [row.state for row in desk.rounds()] == ["done", "open"]


@pytest.fixture(params=["bucket", "spool_address"])
def outside(clean_db: Database, request: pytest.FixtureRequest) -> Iterator[Database]:
    """Return a database with its tensors in a bucket or a folder."""
    address = request.getfixturevalue(request.param)
    database = Database(clean_db.url.render_as_string(hide_password=False), address)
    yield database
    database.close()


def test_a_lost_object_fails_its_round_by_name(outside: Database) -> None:
    """Retrying would leave the round aggregating forever."""
    desk = Desk(outside)
    desk.upload(desk.join("north"), 1)
    with outside.read() as session:
        (key,) = session.execute(
            select(BlobChunk.object_key).join(Update, Update.blob_id == BlobChunk.blob_id)
        ).scalars()
    assert outside.objects is not None
    outside.objects.delete([str(key)])
    desk.aggregate()
    assert desk.view.state == "paused"
    assert "round 1 failed: stored tensors are missing; " in desk.view.reason
    assert str(key) in desk.view.reason


def test_jobs_do_not_wait_for_each_other(clean_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats are written even while folding never rests and cleaning fails."""
    desk = Desk(clean_db)
    north = desk.join("north")
    cleaned, over = threading.Event(), threading.Event()

    def fold(_self: Aggregator) -> bool:
        return not over.wait(0.01)

    def fail(*_: object) -> int:
        cleaned.set()
        raise RuntimeError("there is no space left")

    monkeypatch.setattr(worker_module.Aggregator, "step", fold)
    monkeypatch.setattr(worker_module.Cleaner, "clean", fail)
    beats, later = Heartbeats(), desk.clock() + 5
    beats.note(north.client_id, later)
    worker = BackgroundJobs(desk.ctx, beats, Retention())
    worker.start()
    try:
        assert cleaned.wait(30)
        while beats.seen:
            over.wait(0.01)
    finally:
        over.set()
        worker.stop()
    with clean_db.read() as session:
        assert session.get_one(Client, north.client_id).last_seen_at == later
