"""The life of a round against real databases, with a clock that the tests move."""

from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session
from support.desk import (
    OPERATOR,
    Clock,
    Desk,
    fedavg_plan,
    mean_bits,
    refused,
)
from support.plans import small_plan

from server.core.errors import Conflict, NotAllowed, NotFound
from server.core.sampling import choose_participants
from server.service import clients, deadlines, downloads, federations, tasks
from server.service.context import Actor, Identity, round_context
from server.service.uploads.resumable import UploadPart
from server.store.database import Database
from server.store.tables import Blob, Client, Participant
from shared.tensors.wire import digest


class TestOpening:
    def test_waits_for_the_clients_that_the_plan_asks_for(self, clean_db: Database) -> None:
        desk = Desk(clean_db, fedavg_plan(min_clients=2, join_deadline_s=600))
        desk.join("north")
        assert desk.view.round is None
        assert desk.view.waiting_for == "waiting for clients to join: 1 of at least 2; deadline in 10 min"
        desk.join("south")
        assert (desk.round.number, desk.round.state, desk.round.participants) == (1, "open", 2)
        assert desk.round.deadline_at == desk.clock.now + 60

    def test_pauses_when_they_do_not_come_in_time(self, clean_db: Database) -> None:
        desk = Desk(clean_db, fedavg_plan(min_clients=2, join_deadline_s=600))
        desk.let_pass(599)
        assert desk.view.state == "running"
        desk.let_pass(1)
        assert desk.view.state == "paused"
        assert desk.view.reason == "only 0 of 2 clients joined before the join deadline"
        federations.resume(desk.ctx, OPERATOR, desk.name)
        assert desk.view.waiting_for == "waiting for clients to join: 0 of at least 2; deadline in 10 min"

    def test_the_time_to_join_counts_from_the_last_round(self, clean_db: Database) -> None:
        """When sites leave a running federation, others get the full time to join again."""
        desk = Desk(clean_db, fedavg_plan(min_clients=2, deadline_s=5000, join_deadline_s=600))
        north, south = desk.join("north"), desk.join("south")
        desk.let_pass(4000)
        desk.upload(south, 1)
        clients.leave(desk.ctx, south, OPERATOR)
        desk.run_round({north: 2})
        assert desk.view.waiting_for == "waiting for clients to join: 1 of at least 2; deadline in 10 min"
        assert desk.view.waiting_since == desk.clock.now
        desk.let_pass(599)
        assert desk.view.state == "running"
        desk.let_pass(1)
        assert desk.view.reason == "only 1 of 2 clients joined before the join deadline"

    def test_does_not_begin_before_it_is_started(self, clean_db: Database) -> None:
        desk = Desk(clean_db, start=False)
        north = desk.join("north")
        desk.let_pass(10**6)
        assert (desk.view.state, desk.view.round) == ("created", None)
        assert tasks.task(desk.ctx, north).reason == "the operator has not started it"
        federations.start(desk.ctx, OPERATOR, desk.name)
        assert desk.round.number == 1

    def test_a_late_joiner_takes_part_from_the_next_round_on(self, clean_db: Database) -> None:
        desk = Desk(clean_db)
        north = desk.join("north")
        late = desk.join("late")
        assert tasks.task(desk.ctx, late).action == "wait"
        assert tasks.task(desk.ctx, late).reason == "waiting for 1 of 1 clients; deadline in 60 s"
        refused(NotAllowed, "not-a-participant", lambda: downloads.round_personal(desk.ctx, late, desk.round.id))
        desk.run_round({north: 1})
        assert (desk.round.number, desk.round.participants) == (2, 2)
        assert tasks.task(desk.ctx, late).action == "train"

    def test_chooses_the_share_of_the_plan_with_the_plans_seed(self, clean_db: Database) -> None:
        desk = Desk(clean_db, fedavg_plan(min_clients=5, sample_fraction=0.4))
        sites = {name: desk.join(name) for name in ("a", "b", "c", "d", "e")}
        for number in (1, 2):
            chosen = choose_participants(list(sites), 0.4, desk.plan.seed, number)
            with clean_db.read() as session:
                query = select(Client.name).join(Participant).where(Participant.round_id == desk.round.id)
                assert sorted(session.execute(query).scalars()) == chosen
            assert len(chosen) == 2
            desk.run_round({sites[name]: seed for seed, name in enumerate(chosen)})

    def test_freezes_roster_and_facts(self, clean_db: Database) -> None:
        """Class counts that change during a round apply from the next one on."""
        desk = Desk(clean_db, small_plan(method={"name": "distrans", "offset_aggregation": "auto"}))
        north = desk.join("north", cat=5, dog=5)
        before = desk.rounds()[0]
        clients.update_counts(desk.ctx, north, OPERATOR, {"cat": 9})
        assert (desk.rounds()[0].roster, desk.rounds()[0].facts) == (before.roster, before.facts)
        assert [record.class_counts for record in round_context(before).roster] == [(5, 5)]
        desk.run_round({north: 1})
        assert [record.class_counts for record in round_context(desk.rounds()[1]).roster] == [(9, 0)]


class TestLeaving:
    @pytest.fixture
    def desk(self, clean_db: Database) -> Desk:
        return Desk(clean_db, fedavg_plan(min_clients=3))

    @pytest.fixture
    def sites(self, desk: Desk) -> list[Identity]:
        return [desk.join(name) for name in ("east", "north", "south")]

    @staticmethod
    def end(desk: Desk, who: Identity, how: str) -> None:
        if how == "leave":
            clients.leave(desk.ctx, who, Actor(f"client:{who.name}"))
        else:
            clients.revoke(desk.ctx, OPERATOR, desk.name, who.name)

    @pytest.mark.parametrize("how", ["leave", "revoke"])
    def test_is_no_longer_waited_for(self, desk: Desk, sites: list[Identity], how: str) -> None:
        bodies = [desk.body(1), desk.body(2)]
        desk.put(sites[0], bodies[0])
        self.end(desk, sites[2], how)
        assert desk.round.waiting_for == "waiting for 1 of 2 clients: north; deadline in 60 s"
        desk.put(sites[1], bodies[1])
        desk.aggregate()
        assert desk.bits(1) == mean_bits(bodies)

    @pytest.mark.parametrize("how", ["leave", "revoke"])
    def test_closes_a_round_that_waited_for_nobody_else(self, desk: Desk, sites: list[Identity], how: str) -> None:
        desk.upload(sites[0], 1)
        desk.upload(sites[1], 2)
        self.end(desk, sites[2], how)
        assert desk.round.state == "aggregating"

    def test_keeps_the_update_of_who_left(self, desk: Desk, sites: list[Identity]) -> None:
        bodies = [desk.body(seed) for seed in range(3)]
        for who, body in zip(sites, bodies, strict=True):
            desk.put(who, body)
            self.end(desk, who, "leave")
        desk.aggregate()
        assert desk.bits(1) == mean_bits(bodies)

    def test_of_all_fails_the_round(self, desk: Desk, sites: list[Identity]) -> None:
        for who in sites:
            self.end(desk, who, "leave")
        assert (desk.view.state, desk.view.round) == ("paused", None)
        assert desk.view.reason == "round 1 failed: every participant left before uploading"
        assert [(row.state, row.closed_at) for row in desk.rounds()] == [("failed", desk.clock.now)]

    def test_below_the_minimum_waits_for_others_to_join(self, desk: Desk, sites: list[Identity]) -> None:
        self.end(desk, sites[2], "leave")
        desk.run_round({sites[0]: 1, sites[1]: 2})
        assert desk.view.waiting_for is not None
        assert desk.view.waiting_for.startswith("waiting for clients to join: 2 of at least 3;")
        desk.join("west")
        assert (desk.round.number, desk.round.participants) == (2, 3)

    def test_frees_the_name(self, desk: Desk, sites: list[Identity]) -> None:
        refused(Conflict, "client-name-taken", lambda: desk.join("north"))
        self.end(desk, sites[1], "leave")
        again = desk.join("north")
        refused(NotAllowed, "not-a-participant", lambda: desk.upload(again, 1))
        desk.run_round({sites[0]: 1, sites[2]: 2})
        desk.upload(again, 3)


class TestDeadline:
    def test_with_a_quorum_aggregates_what_has_come(self, clean_db: Database) -> None:
        desk = Desk(clean_db, fedavg_plan(min_clients=3, quorum=0.6))
        sites = [desk.join(name) for name in ("east", "north", "south")]
        bodies = [desk.body(1), desk.body(2)]
        desk.put(sites[0], bodies[0])
        desk.put(sites[2], bodies[1])
        desk.let_pass(59.9)
        assert desk.round.state == "open"
        desk.let_pass(0.2)
        assert desk.round.state == "aggregating"
        desk.aggregate()
        assert desk.bits(1) == mean_bits(bodies)
        assert (desk.view.rounds_done, desk.round.number, desk.round.participants) == (1, 2, 3)

    def test_below_the_quorum_fails_the_round_and_pauses(self, clean_db: Database) -> None:
        desk = Desk(clean_db, fedavg_plan(min_clients=3, quorum=0.6))
        sites = [desk.join(name) for name in ("east", "north", "south")]
        desk.upload(sites[0], 1)
        desk.let_pass(60)
        reason = "only 1 of 3 updates arrived before the deadline, 2 are needed"
        assert desk.view.state == "paused"
        assert desk.view.reason == f"round 1 failed: {reason}; missing: north, south"
        assert desk.view.waiting_for == "waiting for the operator to resume it"
        assert [(row.number, row.state, row.reason) for row in desk.rounds()] == [(1, "failed", reason)]
        assert tasks.task(desk.ctx, sites[0]).action == "paused"
        desk.aggregate()
        assert [model.number for model in desk.models()] == [0]

    def test_resumed_after_a_failed_round_goes_on_with_the_next_number(self, clean_db: Database) -> None:
        desk = Desk(clean_db, fedavg_plan(min_clients=2, count=2))
        sites = [desk.join("north"), desk.join("south")]
        desk.run_round({sites[0]: 1, sites[1]: 2})
        desk.upload(sites[0], 3)
        desk.let_pass(60)
        federations.resume(desk.ctx, OPERATOR, desk.name)
        assert (desk.round.number, desk.rounds()[-1].base_model) == (3, 1)
        with clean_db.read() as session:
            base = session.get_one(Blob, desk.models()[1].blob_id)
        pointer = tasks.task(desk.ctx, sites[0]).model
        assert pointer is not None
        assert pointer.digest == base.digest
        desk.run_round({sites[0]: 5, sites[1]: 6})
        assert [(row.number, row.state) for row in desk.rounds()] == [(1, "done"), (2, "failed"), (3, "done")]
        assert [model.number for model in desk.models()] == [0, 1, 3]
        assert (desk.view.state, desk.view.rounds_done) == ("finished", 2)
        refused(NotFound, "no-such-model", lambda: downloads.federation_model(desk.ctx, desk.name, 2))

    def test_passes_for_each_federation_by_its_own_plan(self, clean_db: Database) -> None:
        clock = Clock()
        short = Desk(clean_db, fedavg_plan("short", deadline_s=10), clock)
        long = Desk(clean_db, fedavg_plan("long", deadline_s=1000), clock)
        short.join("north")
        long.join("north")
        short.let_pass(10)
        assert (short.view.state, long.view.state) == ("paused", "running")


class CountingDatabase(Database):
    """Counts write transactions."""

    writes = 0

    def write(self, *, durable: bool = True) -> AbstractContextManager[Session]:
        self.writes += 1
        return super().write(durable=durable)


class TestIdling:
    """The worker checks twice a second: while nothing is due it must not lock anything."""

    @pytest.fixture
    def desk(self, clean_db: Database) -> Iterator[Desk]:
        counting = CountingDatabase(clean_db.url.render_as_string(hide_password=False))
        yield Desk(counting, fedavg_plan(min_clients=2, upload_grace_s=600, upload_idle_s=600, join_deadline_s=100))
        counting.close()

    @staticmethod
    def writes_while(desk: Desk, seconds: float) -> int:
        desk.wait(seconds)
        before = desk.db.writes
        deadlines.enforce_deadlines(desk.ctx)
        return desk.db.writes - before

    def test_writes_only_what_is_due(self, desk: Desk) -> None:
        assert self.writes_while(desk, 99) == 0, "waiting for sites to join"
        north = desk.join("north")
        desk.join("south")
        assert self.writes_while(desk, 59) == 0, "an open round"
        body = desk.body(1)
        UploadPart(desk.ctx, north, desk.round.id, 0, len(body), digest(body)).feed(body[:100])
        assert self.writes_while(desk, 10) == 0, "an upload that goes on past the deadline"
        federations.pause(desk.ctx, OPERATOR, desk.name)
        assert self.writes_while(desk, 10_000) == 0, "paused past the deadline"
        federations.resume(desk.ctx, OPERATOR, desk.name)
        assert desk.view.state == "paused", "the upload had stopped"
        federations.resume(desk.ctx, OPERATOR, desk.name)
        assert self.writes_while(desk, 60) == 1, "a deadline"
        assert desk.view.state == "paused"

    def test_does_not_write_while_a_round_is_aggregated(self, desk: Desk) -> None:
        sites = [desk.join("north"), desk.join("south")]
        for seed, who in enumerate(sites):
            desk.upload(who, seed)
        assert desk.round.state == "aggregating"
        assert self.writes_while(desk, 1000) == 0
