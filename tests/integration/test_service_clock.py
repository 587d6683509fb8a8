"""Deadlines start once sites have connected, and are immune to clocks that jump, are wrong, or stand still."""

import math

import pytest
from sqlalchemy import text, update
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from support.desk import OPERATOR, Clock, Desk, aggregate_until_idle, fedavg_plan

from server.service import deadlines, federations, heartbeats, tasks
from server.service.aggregation import LEASE_S, Aggregator
from server.service.cleaning import Cleaner
from server.service.context import Context, Identity
from server.service.heartbeats import Heartbeats
from server.service.retention import Retention
from server.service.uploads.resumable import UploadPart
from server.service.uptime import UptimeCounter, uptime
from server.store.database import Database
from server.store.tables import Round
from shared.tensors.wire import digest

DAY = 86400.0


def uptime_of(db: Database) -> float:
    with db.read() as session:
        return uptime(session)


class TestFirstContact:
    """Sites enroll days before their agents run; the upload deadline must not have passed by then."""

    @pytest.fixture
    def desk(self, clean_db: Database) -> Desk:
        plan = fedavg_plan(min_clients=3, quorum=0.66, join_deadline_s=DAY, absent_after_s=30 * DAY)
        return Desk(clean_db, plan, polling=False)

    @pytest.fixture
    def sites(self, desk: Desk) -> list[Identity]:
        return [desk.join(name) for name in ("east", "north", "south")]

    def test_of_a_quorum_starts_the_clock(self, desk: Desk, sites: list[Identity]) -> None:
        desk.let_pass(3600)
        assert desk.round.state == "open"
        assert desk.round.deadline_at is None
        assert desk.round.waiting_for == "waiting for 2 of 3 clients to connect: east, north, south; deadline in 23 h"
        assert tasks.task(desk.ctx, sites[0]).deadline_s == 60
        desk.poll(sites[0])
        assert desk.round.waiting_for == "waiting for 1 of 3 clients to connect: north, south; deadline in 23 h"
        desk.let_pass(3600)
        desk.poll(sites[2])
        assert desk.round.deadline_at == desk.clock.now + 60
        assert desk.round.waiting_for == "waiting for 3 of 3 clients: east, north, south; deadline in 60 s"
        desk.let_pass(59)
        assert desk.round.state == "open"
        desk.let_pass(1)
        assert desk.view.reason.startswith(
            "round 1 failed: only 0 of 3 updates arrived before the deadline, 2 are needed"
        )

    def test_counts_an_upload(self, desk: Desk, sites: list[Identity]) -> None:
        desk.upload(sites[0], 1)
        assert desk.round.deadline_at is None
        desk.upload(sites[1], 2)
        assert desk.round.deadline_at == desk.clock.now + 60
        desk.let_pass(60)
        assert desk.round.state == "aggregating"

    def test_is_waited_for_within_a_stated_bound(self, desk: Desk, sites: list[Identity]) -> None:
        desk.poll(sites[0])
        desk.let_pass(DAY - 1)
        assert desk.round.state == "open"
        desk.let_pass(1)
        assert desk.view.state == "paused"
        assert desk.view.reason == (
            "round 1 failed: only 1 of 3 clients connected in time, 2 are needed; not seen: north, south"
        )

    def test_is_kept_while_it_cannot_be_written(
        self, desk: Desk, sites: list[Identity], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        beats, round_id = Heartbeats(), desk.round.id
        for who in sites[:2]:
            beats.note(who.client_id, desk.clock(), round_id)
        with monkeypatch.context() as patch:
            patch.setattr(desk.db, "write", lambda: desk.db.engine.connect().execute(text("SELECT nothing")))
            with pytest.raises(SQLAlchemyError):
                beats.flush(desk.ctx)
        beats.flush(desk.ctx)
        assert (beats.seen, beats.handed) == ({}, {})
        assert desk.round.deadline_at == desk.clock.now + 60

    def test_is_kept_when_its_own_transaction_fails(
        self, desk: Desk, sites: list[Identity], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An agent that trains for hours does not poll again soon: a busy database must not lose its heartbeat."""
        beats, round_id = Heartbeats(), desk.round.id
        for who in sites[:2]:
            beats.note(who.client_id, desk.clock(), round_id)

        def busy(*_: object) -> None:
            raise OperationalError("UPDATE", {}, Exception("canceling statement due to lock timeout"))

        with monkeypatch.context() as patch:
            patch.setattr(heartbeats, "mark_seen", busy)
            beats.flush(desk.ctx)
        assert desk.round.deadline_at is None
        beats.flush(desk.ctx)
        assert desk.round.deadline_at == desk.clock.now + 60

    def test_waits_through_a_pause(self, desk: Desk, sites: list[Identity]) -> None:
        federations.pause(desk.ctx, OPERATOR, desk.name)
        desk.poll(*sites)
        desk.let_pass(10 * DAY)
        assert (desk.round.state, desk.round.deadline_at) == ("open", None)
        federations.resume(desk.ctx, OPERATOR, desk.name)
        desk.let_pass(DAY - 1)
        assert desk.round.state == "open"


@pytest.mark.parametrize("jump", [DAY, -DAY])
class TestJump:
    """The machine's clock jumps by a day while a round is open."""

    @pytest.fixture
    def desk(self, clean_db: Database) -> Desk:
        return Desk(clean_db, fedavg_plan(min_clients=2, quorum=0.5, upload_idle_s=60, upload_grace_s=600))

    @pytest.fixture
    def sites(self, desk: Desk) -> list[Identity]:
        return [desk.join("north"), desk.join("south")]

    @pytest.mark.parametrize("restart", [False, True])
    def test_neither_fails_nor_stalls_the_round(
        self, desk: Desk, sites: list[Identity], jump: float, restart: bool
    ) -> None:
        desk.upload(sites[0], 1)
        desk.let_pass(30)
        desk.clock.jump(jump)
        if restart:
            desk.restart()
        desk.let_pass(29)
        assert desk.round.state == "open"
        assert tasks.task(desk.ctx, sites[1]).deadline_s == pytest.approx(1)
        desk.let_pass(1)
        assert desk.round.state == "aggregating"
        desk.aggregate()
        assert desk.view.rounds_done == 1

    def test_does_not_end_an_upload(self, desk: Desk, sites: list[Identity], jump: float) -> None:
        desk.upload(sites[0], 1)
        desk.let_pass(59)
        body = desk.body(2)
        part = UploadPart(desk.ctx, sites[1], desk.round.id, 0, len(body), digest(body))
        part.feed(body[:100])
        desk.clock.jump(jump)
        desk.let_pass(2)
        Cleaner(desk.ctx, Retention()).clean()
        assert "still uploading after the deadline" in str(desk.round.waiting_for)
        part.feed(body[100:])
        part.finish()
        desk.aggregate()
        assert desk.view.rounds_done == 1

    def test_does_not_change_a_pause(self, desk: Desk, sites: list[Identity], jump: float) -> None:
        del sites
        desk.let_pass(20)
        federations.pause(desk.ctx, OPERATOR, desk.name)
        desk.clock.jump(jump)
        desk.let_pass(5)
        federations.resume(desk.ctx, OPERATOR, desk.name)
        assert desk.round.deadline_at == pytest.approx(desk.clock.now + 40)

    def test_of_a_command_line_changes_nothing(self, desk: Desk, sites: list[Identity], jump: float) -> None:
        """A machine with a wrong clock pauses and resumes through the database."""
        del sites
        elsewhere = Context(desk.db, Clock(desk.clock.now + jump))
        desk.let_pass(20)
        federations.pause(elsewhere, OPERATOR, desk.name)
        federations.resume(elsewhere, OPERATOR, desk.name)
        assert desk.round.deadline_at == pytest.approx(desk.clock.now + 40)

    def test_of_one_replica_does_not_confuse_the_other(self, desk: Desk, sites: list[Identity], jump: float) -> None:
        """Two processes with clocks a day apart both count uptime, no second twice, and either may aggregate."""
        desk.upload(sites[0], 1)
        other = Clock(desk.clock.now + jump)
        ctx = Context(desk.db, other, other.monotonic)
        counter = UptimeCounter(ctx)
        before = uptime_of(desk.db)
        for _ in range(25):
            desk.let_pass(2)
            other.advance(2)
            counter.count()
            deadlines.enforce_deadlines(ctx)
        assert uptime_of(desk.db) - before == pytest.approx(50)
        assert desk.round.state == "open"
        desk.let_pass(10)
        aggregate_until_idle(Aggregator(ctx))
        assert desk.view.rounds_done == 1


class TestLease:
    @pytest.mark.parametrize("until", [1e12, LEASE_S + 1])
    def test_in_the_far_future_is_free(self, clean_db: Database, until: float) -> None:
        """A process with a fast clock wrote this before it died, with this release or an older one."""
        desk = Desk(clean_db)
        desk.upload(desk.join("north"), 1)
        with clean_db.write() as session:
            lease = {"lease_owner": "dead", "lease_until": uptime(session) + until}
            session.execute(update(Round).values(lease))
        desk.aggregate()
        assert desk.view.rounds_done == 1


class TestUptime:
    def test_does_not_count_while_the_coordinator_is_down_or_out_of_reach(self, clean_db: Database) -> None:
        desk = Desk(clean_db)
        counter = UptimeCounter(desk.ctx)
        counter.count()
        desk.clock.advance(2)
        counter.count()
        before = uptime_of(clean_db)
        desk.clock.advance(DAY)  # it could not reach its database
        counter.count()
        assert uptime_of(clean_db) - before <= 60
        before = uptime_of(clean_db)
        desk.clock.advance(DAY)
        UptimeCounter(desk.ctx).count()  # it was down
        assert uptime_of(clean_db) == before

    def test_is_not_written_while_nothing_is_timed(self, clean_db: Database) -> None:
        desk = Desk(clean_db, start=False)
        counter = UptimeCounter(desk.ctx, longest_step_s=math.inf)
        for _ in range(3):
            counter.count()
            desk.clock.advance(100)
        assert uptime_of(clean_db) == 0
