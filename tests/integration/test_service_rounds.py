"""The life of federations and rounds against real databases, on a clock that the tests move."""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Barrier

import pytest
import safetensors.torch
import torch
from alembic import command
from alembic.config import Config
from sqlalchemy import delete, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from support.plans import small_plan, update_body
from support.service import (
    FEDAVG,
    MEAN_OFFSETS,
    OPERATOR,
    Clock,
    Desk,
    count,
    fedavg_plan,
    mean_bits,
    put,
    unreferenced_blobs,
)

from server.core.errors import Conflict, CoordinatorError, Gone, InvalidInput, NotAllowed, NotFound
from server.core.sampling import choose_participants
from server.service import archive, audit, enrolment, evaluations, federations, housekeeping, reports, tasks
from server.service.context import Actor, Context, facts_of, load_roster
from server.service.enrolment import Identity
from server.service.housekeeping import Heartbeats, Retention
from server.service.uploads import UploadPart
from server.store import blobs, schema
from server.store.session import Database, DatabaseError
from server.store.tables import Blob, BlobChunk, Client, Federation, Participant, Personal, Round, Transfer, Update
from shared.evaluation import Evaluation
from shared.methods import METHODS, server_half
from shared.methods.base import ServerState
from shared.plan import FederationPlan
from shared.wire import digest, encode

TINY_NETWORK = {
    "name": "distrans",
    "offset_aggregation": "network",
    "generator": {"width": 8, "hidden": 8, "inputs": "embedding+offset"},
}


def refused(kind: type[CoordinatorError], code: str, step: Callable[[], object]) -> CoordinatorError:
    with pytest.raises(kind) as caught:
        step()
    assert caught.value.code == code
    return caught.value


def measured(correct: int, samples: int = 10) -> Evaluation:
    return Evaluation(samples=samples, correct=correct, loss_sum=1.0)


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
        assert desk.view.reason == "only 0 of 2 clients had joined when the time to join was over"
        federations.resume(desk.ctx, OPERATOR, desk.name)
        assert desk.view.waiting_for == "waiting for clients to join: 0 of at least 2; deadline in 10 min"

    def test_the_time_to_join_counts_from_the_last_round(self, clean_db: Database) -> None:
        """Sites that leave a federation under way give others the whole time to join anew."""
        desk = Desk(clean_db, fedavg_plan(min_clients=2, deadline_s=5000, join_deadline_s=600))
        north, south = desk.join("north"), desk.join("south")
        desk.let_pass(4000)
        desk.upload(south, 1)
        enrolment.leave(desk.ctx, south, OPERATOR)
        desk.run_round({north: 2})
        assert desk.view.waiting_for == "waiting for clients to join: 1 of at least 2; deadline in 10 min"
        assert desk.view.waiting_since == desk.clock.now
        desk.let_pass(599)
        assert desk.view.state == "running"
        desk.let_pass(1)
        assert desk.view.reason == "only 1 of 2 clients had joined when the time to join was over"

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
        refused(NotAllowed, "not-a-participant", lambda: tasks.round_model(desk.ctx, late, desk.round.id))
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
        """Class counts that change while a round is open count from the next one on."""
        desk = Desk(clean_db, small_plan(method={"name": "distrans", "offset_aggregation": "auto"}))
        north = desk.join("north", cat=5, dog=5)
        before = desk.rounds()[0]
        enrolment.update_counts(desk.ctx, north, OPERATOR, {"cat": 9})
        assert (desk.rounds()[0].roster, desk.rounds()[0].facts) == (before.roster, before.facts)
        assert [record.class_counts for record in load_roster(before.roster)] == [(5, 5)]
        desk.run_round({north: 1})
        assert [record.class_counts for record in load_roster(desk.rounds()[1].roster)] == [(9, 0)]


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
            enrolment.leave(desk.ctx, who, Actor(f"client:{who.name}"))
        else:
            enrolment.revoke(desk.ctx, OPERATOR, desk.name, who.name)

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
        assert desk.view.reason == "round 1 failed: every participant left before it uploaded anything"
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
        reason = "only 1 of 3 updates came before the deadline, 2 are needed"
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
        assert tasks.round_model(desk.ctx, sites[0], desk.round.id).digest == base.digest
        desk.run_round({sites[0]: 5, sites[1]: 6})
        assert [(row.number, row.state) for row in desk.rounds()] == [(1, "done"), (2, "failed"), (3, "done")]
        assert [model.number for model in desk.models()] == [0, 1, 3]
        assert (desk.view.state, desk.view.rounds_done) == ("finished", 2)
        refused(NotFound, "no-such-model", lambda: tasks.federation_model(desk.ctx, desk.name, 2))

    def test_passes_for_each_federation_by_its_own_plan(self, clean_db: Database) -> None:
        clock = Clock()
        short = Desk(clean_db, fedavg_plan("short", deadline_s=10), clock)
        long = Desk(clean_db, fedavg_plan("long", deadline_s=1000), clock)
        short.join("north")
        long.join("north")
        short.let_pass(10)
        assert (short.view.state, long.view.state) == ("paused", "running")


class CountingDatabase(Database):
    """Knows how many write transactions there were."""

    writes = 0

    def write(self) -> AbstractContextManager[Session]:
        self.writes += 1
        return super().write()


class TestIdling:
    """The worker looks twice a second: where nothing is due it must not lock anything."""

    @pytest.fixture
    def desk(self, clean_db: Database) -> Iterator[Desk]:
        counting = CountingDatabase(clean_db.url.render_as_string(hide_password=False))
        yield Desk(counting, fedavg_plan(min_clients=2, upload_grace_s=600, upload_idle_s=600, join_deadline_s=100))
        counting.close()

    @staticmethod
    def writes_while(desk: Desk, seconds: float) -> int:
        before = desk.db.writes
        desk.let_pass(seconds)
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


class TestPause:
    @pytest.fixture
    def desk(self, clean_db: Database) -> Desk:
        return Desk(clean_db, fedavg_plan(min_clients=2))

    @pytest.fixture
    def sites(self, desk: Desk) -> list[Identity]:
        return [desk.join("north"), desk.join("south")]

    def test_stops_the_clock_of_the_open_round(self, desk: Desk, sites: list[Identity]) -> None:
        deadline = desk.round.deadline_at
        desk.let_pass(20)
        federations.pause(desk.ctx, OPERATOR, desk.name, "maintenance")
        assert (desk.view.state, desk.view.reason) == ("paused", "maintenance")
        assert tasks.task(desk.ctx, sites[0]).action == "paused"
        desk.let_pass(5000)
        assert desk.round.state == "open"
        federations.resume(desk.ctx, OPERATOR, desk.name)
        assert desk.round.deadline_at == deadline + 5000
        assert tasks.task(desk.ctx, sites[0]).deadline_s == 40
        desk.let_pass(39)
        assert desk.round.state == "open"
        desk.let_pass(1)
        assert desk.view.state == "paused"

    def test_takes_uploads_but_opens_no_round(self, desk: Desk, sites: list[Identity]) -> None:
        bodies = [desk.body(1), desk.body(2)]
        federations.pause(desk.ctx, OPERATOR, desk.name)
        desk.clock.advance(1000)
        desk.put(sites[0], bodies[0])
        desk.put(sites[1], bodies[1])
        assert desk.round.state == "aggregating"
        assert desk.view.waiting_for == "waiting for the aggregation to finish"
        desk.aggregate()
        assert (desk.view.state, desk.view.rounds_done, desk.view.round) == ("paused", 1, None)
        assert desk.bits(1) == mean_bits(bodies)
        desk.let_pass(10**6)
        assert desk.view.round is None
        federations.resume(desk.ctx, OPERATOR, desk.name)
        assert desk.round.number == 2

    def test_counts_the_pauses_of_a_round_together(self, desk: Desk, sites: list[Identity]) -> None:
        del sites
        deadline = desk.round.deadline_at
        for _ in range(3):
            federations.pause(desk.ctx, OPERATOR, desk.name)
            desk.clock.advance(100)
            federations.pause(desk.ctx, OPERATOR, desk.name)
            desk.clock.advance(100)
            federations.resume(desk.ctx, OPERATOR, desk.name)
            desk.clock.advance(1)
            federations.resume(desk.ctx, OPERATOR, desk.name)
        assert desk.round.deadline_at == deadline + 600

    def test_of_a_round_past_its_deadline_ends_it_when_resumed(self, desk: Desk, sites: list[Identity]) -> None:
        del sites
        desk.clock.advance(60)
        federations.pause(desk.ctx, OPERATOR, desk.name)  # before the coordinator looked at the clock
        desk.clock.advance(60)
        federations.resume(desk.ctx, OPERATOR, desk.name)
        assert (desk.view.state, desk.rounds()[0].state) == ("paused", "failed")

    def test_again_keeps_the_first_reason(self, desk: Desk) -> None:
        federations.pause(desk.ctx, OPERATOR, desk.name, "first")
        federations.pause(desk.ctx, OPERATOR, desk.name, "second")
        assert desk.view.reason == "first"


class TestCancel:
    def test_fails_the_open_round_for_good(self, clean_db: Database) -> None:
        desk = Desk(clean_db, fedavg_plan(min_clients=2))
        sites = [desk.join("north"), desk.join("south")]
        desk.run_round({sites[0]: 1, sites[1]: 2})
        body, round_id = desk.body(3), desk.round.id
        desk.put(sites[0], body)
        federations.cancel(desk.ctx, OPERATOR, desk.name)
        assert (desk.view.state, desk.view.reason) == ("cancelled", "cancelled by the operator")
        assert (desk.rounds()[1].state, desk.rounds()[1].reason) == ("failed", "cancelled by the operator")
        desk.let_pass(10**6)
        desk.aggregate()
        assert [model.number for model in desk.models()] == [0, 1], "the models stay"
        assert tasks.task(desk.ctx, sites[0]).action == "cancelled"
        error = refused(Gone, "round-closed", lambda: put(desk.ctx, sites[1], round_id, body))
        assert "it failed: cancelled by the operator. The federation is cancelled." in error.message

    def test_stops_an_aggregation_under_way(self, clean_db: Database) -> None:
        desk = Desk(clean_db)
        desk.upload(desk.join("north"), 1)
        federations.cancel(desk.ctx, OPERATOR, desk.name)
        desk.aggregate()
        assert [model.number for model in desk.models()] == [0]
        assert desk.view.state == "cancelled"


class TestStates:
    ACTIONS = (federations.start, federations.pause, federations.resume, federations.cancel)

    def test_each_action_twice_is_once(self, clean_db: Database) -> None:
        desk = Desk(clean_db, start=False)
        north = desk.join("north")
        for action in self.ACTIONS:
            action(desk.ctx, OPERATOR, desk.name)
            before = desk.view, len(audit.entries(desk.ctx))
            desk.clock.advance(1)
            action(desk.ctx, OPERATOR, desk.name)
            after = desk.view, len(audit.entries(desk.ctx))
            assert after[1] == before[1]
            assert after[0].state_since == before[0].state_since
        assert [row.number for row in desk.rounds()] == [1]
        assert tasks.task(desk.ctx, north).action == "cancelled"

    @pytest.mark.parametrize(
        ("before", "wrong"),
        [
            ((), (federations.pause, federations.resume)),
            ((federations.start, federations.pause), (federations.start,)),
            ((federations.cancel,), (federations.start, federations.pause, federations.resume)),
        ],
    )
    def test_an_action_in_the_wrong_state_is_a_conflict(
        self, clean_db: Database, before: tuple[Callable[..., None], ...], wrong: tuple[Callable[..., None], ...]
    ) -> None:
        desk = Desk(clean_db, start=False)
        for action in before:
            action(desk.ctx, OPERATOR, desk.name)
        view = desk.view
        for action in wrong:
            error = refused(Conflict, "wrong-state", lambda: action(desk.ctx, OPERATOR, desk.name))  # noqa: B023
            assert f"is {view.state}: it cannot {action.__name__} now" in error.message
        assert desk.view == view

    def test_a_finished_federation_stays_finished(self, clean_db: Database) -> None:
        desk = Desk(clean_db, fedavg_plan(count=1))
        north = desk.join("north")
        desk.run_round({north: 1})
        assert (desk.view.state, desk.view.reason) == ("finished", "all 1 rounds are done")
        assert tasks.task(desk.ctx, north).action == "finished"
        for action in self.ACTIONS:
            refused(Conflict, "wrong-state", lambda: action(desk.ctx, OPERATOR, desk.name))  # noqa: B023

    def test_an_unknown_federation_is_not_found(self, clean_db: Database) -> None:
        ctx = Context(clean_db, Clock())
        for action in self.ACTIONS:
            refused(NotFound, "no-such-federation", lambda: action(ctx, OPERATOR, "nowhere"))  # noqa: B023
        refused(NotFound, "no-such-federation", lambda: federations.show(ctx, "nowhere"))

    def test_a_name_belongs_to_one_federation(self, clean_db: Database) -> None:
        desk = Desk(clean_db)
        refused(Conflict, "name-taken", lambda: federations.create(desk.ctx, OPERATOR, desk.plan))
        assert [view.name for view in federations.list_all(desk.ctx)] == [desk.name]


class TestEarlyEnd:
    def test_at_the_target(self, clean_db: Database) -> None:
        """The accuracy of a model is known once the round that started from it is over."""
        desk = Desk(clean_db, fedavg_plan(count=10, min_clients=2, target_accuracy=0.9))
        sites = [desk.join("north"), desk.join("south")]
        for number, correct in enumerate([(5, 8), (10, 7), (10, 8)]):
            for who, right in zip(sites, correct, strict=True):
                evaluations.submit(desk.ctx, who, number, measured(right))
            assert desk.view.state == "running"
            desk.run_round({sites[0]: 2 * number, sites[1]: 2 * number + 1})
        assert (desk.view.state, desk.view.rounds_done) == ("finished", 3)
        assert desk.view.reason == "the pooled accuracy 0.9000 reached the target 0.9"
        assert (desk.view.best_accuracy, desk.view.best_model) == (0.9, 2)

    def test_at_the_target_although_a_round_failed(self, clean_db: Database) -> None:
        """A failed round leaves a gap in the numbers of the models."""
        desk = Desk(clean_db, fedavg_plan(count=10, target_accuracy=0.9))
        north = desk.join("north")
        desk.run_round({north: 1})
        desk.let_pass(60)
        federations.resume(desk.ctx, OPERATOR, desk.name)
        evaluations.submit(desk.ctx, north, 1, measured(9))
        desk.run_round({north: 2})
        assert [model.number for model in desk.models()] == [0, 1, 3]
        assert (desk.view.state, desk.view.best_model) == ("finished", 1)

    def test_when_patience_is_over(self, clean_db: Database) -> None:
        desk = Desk(clean_db, fedavg_plan(count=10, patience=2))
        north = desk.join("north")
        for number, correct in enumerate([5, 6, 6, 4]):
            assert desk.view.state == "running"
            evaluations.submit(desk.ctx, north, number, measured(correct))
            desk.run_round({north: number})
        assert (desk.view.state, desk.view.reason) == ("finished", "the accuracy has not improved for 2 rounds")
        assert (desk.view.best_accuracy, desk.view.best_model) == (0.6, 1)

    def test_the_last_model_is_judged_when_it_was_tested_as_widely_as_the_one_before(self, clean_db: Database) -> None:
        desk = Desk(clean_db, fedavg_plan(count=2, min_clients=2))
        sites = [desk.join("north"), desk.join("south")]
        for number, correct in enumerate([5, 7]):
            for who in sites:
                evaluations.submit(desk.ctx, who, number, measured(correct))
            desk.run_round(dict.fromkeys(sites, number))
        assert (desk.view.state, desk.view.best_accuracy, desk.view.best_model) == ("finished", 0.7, 1)
        evaluations.submit(desk.ctx, sites[0], 2, measured(10))  # one site alone, which happens to be the easy one
        assert (desk.view.best_accuracy, desk.view.best_model) == (0.7, 1)
        evaluations.submit(desk.ctx, sites[1], 2, measured(6))
        assert (desk.view.best_accuracy, desk.view.best_model) == (0.8, 2)

    def test_not_while_nobody_has_measured_anything(self, clean_db: Database) -> None:
        desk = Desk(clean_db, fedavg_plan(count=4, patience=1, target_accuracy=0.1))
        north = desk.join("north")
        for seed in range(3):
            desk.run_round({north: seed})
        assert (desk.view.state, desk.view.best_accuracy) == ("running", None)


class TestEvaluation:
    @pytest.mark.parametrize(
        "result",
        [
            Evaluation(samples=9, correct=10, loss_sum=1),
            Evaluation(samples=10, correct=5, loss_sum=1, negatives=11),
            Evaluation(samples=10, correct=5, loss_sum=1, negatives=8, negatives_correct=6),
            Evaluation(samples=10, correct=5, loss_sum=1, negatives=4, negatives_correct=3, negatives_as_own=2),
            Evaluation(samples=10, correct=0, loss_sum=1, negatives=4, negatives_as_own=5),
            Evaluation(samples=0, correct=0, loss_sum=1, negatives=1),
        ],
    )
    def test_that_contradicts_itself_is_refused(self, clean_db: Database, result: Evaluation) -> None:
        desk = Desk(clean_db)
        north = desk.join("north")
        refused(InvalidInput, "inconsistent-evaluation", lambda: evaluations.submit(desk.ctx, north, 0, result))

    def test_of_a_model_that_does_not_exist_is_refused(self, clean_db: Database) -> None:
        desk = Desk(clean_db)
        north = desk.join("north")
        refused(NotFound, "no-such-model", lambda: evaluations.submit(desk.ctx, north, 1, measured(1)))

    def test_again_replaces_the_first(self, clean_db: Database) -> None:
        desk = Desk(clean_db, fedavg_plan(min_clients=2))
        north, south = desk.join("north"), desk.join("south")
        desk.run_round({north: 1, south: 2})
        evaluations.submit(desk.ctx, north, 1, measured(1))
        evaluations.submit(desk.ctx, north, 1, measured(7))
        evaluations.submit(desk.ctx, south, 1, measured(30, samples=40))
        (first, _) = reports.rounds(desk.ctx, desk.name, None, 0, 10)
        assert first.evaluation is not None
        assert (first.evaluation.samples, first.evaluation.accuracy) == (50, 37 / 50)
        assert first.client_evaluations["north"].accuracy == 0.7
        (first, _) = reports.rounds(desk.ctx, desk.name, south.client_id, 0, 10)
        assert first.client_evaluations.keys() == {"south"}, "a client sees its own"
        assert first.evaluation is None


class TestPersonalTensors:
    @pytest.fixture
    def desk(self, clean_db: Database) -> Desk:
        return Desk(clean_db, small_plan(method=TINY_NETWORK, rounds={"count": 5, "min_clients": 2}))

    @pytest.fixture
    def sites(self, desk: Desk) -> list[Identity]:
        """North and south after one round, so that there is a network that makes their offsets."""
        sites = [desk.join("north", cat=9, dog=1), desk.join("south", cat=2, dog=8)]
        desk.run_round({sites[0]: 1, sites[1]: 2})
        return sites

    @staticmethod
    def expected(desk: Desk, name: str) -> dict[str, list[float]]:
        """What the method says for the open round, from its frozen roster."""
        round_ = desk.rounds()[-1]
        roster = load_roster(round_.roster)
        private = safetensors.torch.load(blobs.read_all(desk.db, desk.models()[-1].private_blob_id or ""))
        (client,) = [record for record in roster if record.id == name]
        tensors = server_half(desk.plan).personal(ServerState({}, private), client, roster, facts_of(round_.facts))
        return {key: value.flatten().tolist() for key, value in tensors.items()}

    @staticmethod
    def stored(desk: Desk, blob: Blob) -> dict[str, list[float]]:
        tensors = safetensors.torch.load(blobs.read_all(desk.db, blob.id))
        return {key: value.flatten().tolist() for key, value in tensors.items()}

    def test_are_made_once_whichever_process_is_asked(self, desk: Desk, sites: list[Identity]) -> None:
        round_id, url = desk.round.id, desk.db.url.render_as_string(hide_password=False)
        others = [Database(url) for _ in range(4)]
        barrier = Barrier(len(others))

        def ask(db: Database) -> tuple[str, str | None]:
            barrier.wait()
            blob = tasks.round_personal(Context(db, desk.clock), sites[0], round_id)
            return blob.id, blob.digest

        with ThreadPoolExecutor(len(others)) as pool:
            answers = set(pool.map(ask, others))
        for db in others:
            db.close()
        blob = tasks.round_personal(desk.ctx, sites[0], round_id)
        assert answers == {(blob.id, blob.digest)}
        assert count(desk.db, Personal) == [1]
        assert unreferenced_blobs(desk.db) == set()
        assert self.stored(desk, blob) == self.expected(desk, "north")

    def test_differ_from_client_to_client(self, desk: Desk, sites: list[Identity]) -> None:
        digests = {tasks.round_personal(desk.ctx, who, desk.round.id).digest for who in sites}
        assert len(digests) == 2

    def test_follow_the_roster_of_the_round(self, desk: Desk, sites: list[Identity]) -> None:
        """New class counts count from the next round on, also for a client that has not asked for its tensors yet."""
        enrolment.update_counts(desk.ctx, sites[0], OPERATOR, {"cat": 1, "dog": 99})
        blob = tasks.round_personal(desk.ctx, sites[0], desk.round.id)
        assert self.stored(desk, blob) == self.expected(desk, "north")

    def test_for_serving_stay_the_same_while_the_model_does(self, desk: Desk, sites: list[Identity]) -> None:
        first = tasks.serving_personal(desk.ctx, sites[0], desk.name, 1)
        desk.restart()
        assert tasks.serving_personal(desk.ctx, sites[0], desk.name, 1).id == first.id

    def test_of_an_old_model_are_gone(self, desk: Desk, sites: list[Identity]) -> None:
        round_id = desk.round.id
        desk.run_round({sites[0]: 3, sites[1]: 4})
        refused(Gone, "model-superseded", lambda: tasks.round_personal(desk.ctx, sites[0], round_id))
        refused(Gone, "model-superseded", lambda: tasks.serving_personal(desk.ctx, sites[0], desk.name, 1))
        refused(NotFound, "no-such-model", lambda: tasks.serving_personal(desk.ctx, sites[0], desk.name, 99))


class TestRetention:
    @staticmethod
    def kept(desk: Desk) -> dict[int, int]:
        """How many updates of each round still have their bytes."""
        with desk.db.read() as session:
            query = select(Round.number, Update.blob_id).join(Update, Update.round_id == Round.id)
            rows = session.execute(query.order_by(Round.number)).all()
        kept = dict.fromkeys([number for number, _ in rows], 0)
        for number, blob_id in rows:
            kept[number] += blob_id is not None
        return kept

    @pytest.mark.parametrize(
        ("keep", "expected"),
        [
            (0, {1: 0, 2: 0, 3: 0, 4: 1}),
            (1, {1: 0, 2: 0, 3: 2, 4: 1}),
            (2, {1: 0, 2: 1, 3: 2, 4: 1}),
            (99, {1: 2, 2: 1, 3: 2, 4: 1}),
        ],
    )
    def test_keeps_the_uploads_of_the_newest_finished_rounds(
        self, clean_db: Database, keep: int, expected: dict[int, int]
    ) -> None:
        """Of four rounds the second failed and the last is open: its updates are needed whatever the setting."""
        desk = Desk(clean_db, fedavg_plan(min_clients=2, count=9))
        sites = [desk.join("north"), desk.join("south")]
        desk.run_round({sites[0]: 1, sites[1]: 2})
        desk.upload(sites[0], 3)
        desk.let_pass(60)
        federations.resume(desk.ctx, OPERATOR, desk.name)
        desk.run_round({sites[0]: 4, sites[1]: 5})
        desk.upload(sites[0], 6)
        housekeeping.clean(desk.ctx, Retention(keep_round_uploads=keep))
        assert self.kept(desk) == expected
        assert unreferenced_blobs(desk.db) == set()
        assert [model.number for model in desk.models()] == [0, 1, 3]
        assert [len(row.uploads) for row in reports.rounds(desk.ctx, desk.name, None, 0, 10)] == [2, 1, 2, 1]

    def test_counts_the_rounds_of_each_federation_by_themselves(self, clean_db: Database) -> None:
        clock = Clock()
        desks = [Desk(clean_db, fedavg_plan(name), clock) for name in ("cats", "dogs")]
        for desk in desks:
            north = desk.join("north")
            for seed in range(2):
                desk.run_round({north: seed})
        housekeeping.clean(desks[0].ctx, Retention(keep_round_uploads=1))
        with clean_db.read() as session:
            query = select(Round.number).join(Update).where(Update.blob_id.is_not(None))
            assert list(session.execute(query).scalars()) == [2, 2]

    def test_keeps_everything_that_a_round_under_way_needs(self, clean_db: Database) -> None:
        """Housekeeping may run at any time, with any clock, and the round still ends as it should."""
        plan = small_plan(method=MEAN_OFFSETS, rounds={"count": 3, "min_clients": 2, "deadline_s": 30 * 86400})
        runs = []
        for name, careful in (("clean", True), ("plain", False)):
            desk = Desk(clean_db, plan.model_copy(update={"name": name}))
            sites = [desk.join("north"), desk.join("south")]
            for number in range(3):
                for seed, who in enumerate(sites):
                    tasks.round_personal(desk.ctx, who, desk.round.id)
                    desk.upload(who, 10 * number + seed)
                    if careful:
                        desk.clock.advance(2 * 86400)
                        while housekeeping.clean(desk.ctx, Retention(keep_round_uploads=0)):
                            pass
                desk.aggregate()
            runs.append((desk.bits(3), desk.private_bits()))
        assert runs[0] == runs[1]

    def test_drops_personal_tensors_of_models_long_gone(self, clean_db: Database) -> None:
        desk = Desk(clean_db, small_plan(method=MEAN_OFFSETS, rounds={"count": 9}))
        north = desk.join("north")
        for seed in range(3):
            tasks.round_personal(desk.ctx, north, desk.round.id)
            desk.run_round({north: seed})
        tasks.round_personal(desk.ctx, north, desk.round.id)
        housekeeping.clean(desk.ctx, Retention())
        with clean_db.read() as session:
            assert sorted(session.execute(select(Personal.model_number)).scalars()) == [2, 3]
        assert unreferenced_blobs(desk.db) == set()

    def test_collects_what_a_crash_left_behind(self, clean_db: Database) -> None:
        desk = Desk(clean_db)
        orphan = blobs.store(clean_db, b"written by a process that died", desk.clock.now)
        desk.clock.advance(3600)
        assert housekeeping.clean(desk.ctx, Retention(garbage_s=3600)) == 0
        desk.clock.advance(1)
        assert housekeeping.clean(desk.ctx, Retention(garbage_s=3600)) == 1
        with clean_db.read() as session:
            assert session.get(Blob, orphan) is None
        assert len(desk.model(0)) > 0

    def test_what_was_dropped_is_gone_and_not_empty(self, clean_db: Database) -> None:
        desk = Desk(clean_db, fedavg_plan(min_clients=2))
        kept = tasks.federation_model(desk.ctx, desk.name, 0)
        pieces = blobs.read(clean_db, kept.id)
        with clean_db.write() as session:
            session.execute(delete(BlobChunk).where(BlobChunk.blob_id == kept.id))
        for step in (lambda: list(pieces), lambda: blobs.read(clean_db, kept.id, 0, 8)):
            refused(Gone, "tensors-dropped", step)
        orphan = blobs.store(clean_db, b"of no use", desk.clock.now)
        with clean_db.write() as session:
            blobs.drop(session, orphan)
        for blob_id in (orphan, ""):
            refused(Gone, "tensors-dropped", lambda: blobs.read(clean_db, blob_id))  # noqa: B023

    def test_only_the_newest_model_keeps_private_state(self, clean_db: Database) -> None:
        desk = Desk(clean_db, small_plan(method=MEAN_OFFSETS, rounds={"count": 9}))
        north = desk.join("north")
        for seed in range(3):
            desk.run_round({north: seed})
        assert [model.private_blob_id is not None for model in desk.models()] == [False, False, False, True]
        assert unreferenced_blobs(desk.db) == set()


class TestHeartbeats:
    def test_are_written_together_and_never_go_back(self, clean_db: Database) -> None:
        desk = Desk(clean_db)
        north, south = desk.join("north"), desk.join("south")
        joined = desk.clock.now
        beats = Heartbeats()
        beats.note(north.client_id, joined + 5)
        beats.note(south.client_id, joined - 5)
        beats.flush(desk.ctx)
        assert enrolment.me(desk.ctx, north).last_seen_at == joined + 5
        assert enrolment.me(desk.ctx, south).last_seen_at == joined
        assert beats.seen == {}


class TestAuditLog:
    def test_tells_who_did_what_from_where(self, clean_db: Database) -> None:
        desk = Desk(clean_db, fedavg_plan(min_clients=2))
        north = desk.join("north")
        desk.join("south")
        desk.upload(north, 1)
        enrolment.rotate(desk.ctx, OPERATOR, desk.name, "north")
        enrolment.leave(desk.ctx, north, Actor("client:north", "198.51.100.7"))
        enrolment.revoke(desk.ctx, OPERATOR, desk.name, "south")
        federations.pause(desk.ctx, OPERATOR, desk.name)
        federations.resume(desk.ctx, OPERATOR, desk.name)
        federations.cancel(desk.ctx, OPERATOR, desk.name)
        rows = audit.entries(desk.ctx)
        assert [row.action for row in rows] == [
            "federation.create",
            "federation.start",
            "invite.create",
            "client.join",
            "invite.create",
            "client.join",
            "client.rotate",
            "client.leave",
            "client.revoke",
            "federation.pause",
            "federation.resume",
            "federation.cancel",
        ]
        assert {row.federation for row in rows} == {desk.name}
        assert (rows[0].actor, rows[0].address, rows[0].at) == ("operator", "192.0.2.1", desk.clock.now)
        assert (rows[7].actor, rows[7].address, rows[7].detail) == (
            "client:north",
            "198.51.100.7",
            '{"client": "north"}',
        )

    def test_tells_what_the_coordinator_did_by_itself(self, clean_db: Database) -> None:
        desk = Desk(clean_db)
        desk.join("north")
        desk.let_pass(60)
        failed, paused = audit.entries(desk.ctx)[-2:]
        assert (failed.actor, failed.action) == ("coordinator", "round.failed")
        assert '"round": 1' in failed.detail
        assert (paused.actor, paused.action) == ("coordinator", "federation.paused")

    def test_says_nothing_of_what_was_refused(self, clean_db: Database) -> None:
        desk = Desk(clean_db, start=False)
        before = len(audit.entries(desk.ctx))
        refused(Conflict, "wrong-state", lambda: federations.pause(desk.ctx, OPERATOR, desk.name))
        assert len(audit.entries(desk.ctx)) == before

    def test_holds_no_secrets(self, clean_db: Database) -> None:
        desk = Desk(clean_db)
        token = desk.join_token("north")
        secret = token.split("_", 2)[2]
        assert all(secret not in row.model_dump_json() for row in audit.entries(desk.ctx))

    def test_is_read_page_by_page(self, clean_db: Database) -> None:
        desk = Desk(clean_db)
        desk.join("north")
        rows = audit.entries(desk.ctx)
        assert audit.entries(desk.ctx, after_id=rows[1].id) == rows[2:]
        assert audit.entries(desk.ctx, limit=2) == rows[:2]
        assert list(audit.all_entries(desk.ctx)) == rows
        assert audit.entries(desk.ctx, federation="another") == []

    @pytest.mark.parametrize(
        "statement",
        ["UPDATE audit SET actor = 'nobody'", "DELETE FROM audit", "TRUNCATE audit", "UPDATE audit SET at=0"],
    )
    def test_cannot_be_changed(self, clean_db: Database, statement: str) -> None:
        """Not even by somebody with the coordinator's access to the database."""
        desk = Desk(clean_db)
        before = audit.entries(desk.ctx)
        if clean_db.is_sqlite and statement.startswith("TRUNCATE"):
            return  # SQLite has no such statement
        with pytest.raises(DBAPIError, match="the audit log is append-only"), clean_db.write() as session:
            session.execute(text(statement))
        assert audit.entries(desk.ctx) == before

    def test_cannot_be_written_over(self, clean_db: Database) -> None:
        """SQLite's REPLACE deletes without asking the trigger against deletions; PostgreSQL's form is an UPDATE."""
        desk = Desk(clean_db)
        before = audit.entries(desk.ctx)
        insert = (
            "INSERT INTO audit (id, at, actor, action, federation, address, detail) VALUES (1, 0, '', '', '', '', '')"
        )
        statements = [insert + " ON CONFLICT (id) DO UPDATE SET actor = ''"]
        if clean_db.is_sqlite:
            statements += [insert.replace("INSERT", verb, 1) for verb in ("INSERT OR REPLACE", "REPLACE")]
        for statement in statements:
            with pytest.raises(DBAPIError, match="the audit log is append-only"), clean_db.write() as session:
                session.execute(text(statement))
        assert audit.entries(desk.ctx) == before


class TestArchive:
    PLAN = small_plan(method=TINY_NETWORK, rounds={"count": 4, "min_clients": 2})

    @staticmethod
    def run_rounds(desk: Desk, sites: list[Identity], numbers: range) -> list[tuple[str, ...]]:
        """Two sites train; what they were sent, and what came out, by digest."""
        trace = []
        for number in numbers:
            sent = [tasks.round_personal(desk.ctx, who, desk.round.id).digest or "" for who in sites]
            desk.run_round({sites[0]: 2 * number, sites[1]: 2 * number + 1})
            trace.append((*sent, desk.bits(number), desk.private_bits() or ""))
        return trace

    @pytest.mark.parametrize("target", ["folder", "federation.zip"])
    def test_restored_goes_on_to_the_same_bits(self, clean_db: Database, tmp_path: Path, target: str) -> None:
        original = Desk(clean_db, self.PLAN)
        sites = [original.join("north", cat=9, dog=1), original.join("south", cat=2, dog=8)]
        self.run_rounds(original, sites, range(1, 3))
        exported = archive.export(original.ctx, OPERATOR, original.name, tmp_path / target)
        copy = self.restored(clean_db, exported)
        assert (copy.view.state, copy.view.reason) == ("paused", "imported after round 2")
        assert (copy.view.rounds_done, copy.view.latest_model) == (2, 2)
        assert (copy.bits(), copy.private_bits()) == (original.bits(), original.private_bits())
        again = [copy.join("north", cat=9, dog=1), copy.join("south", cat=2, dog=8)]
        federations.resume(copy.ctx, OPERATOR, copy.name)
        assert copy.round.number == 3
        assert self.run_rounds(copy, again, range(3, 5)) == self.run_rounds(original, sites, range(3, 5))
        assert (copy.view.state, original.view.state) == ("finished", "finished")

    def restored(self, db: Database, source: Path) -> Desk:
        ctx = Context(db, Clock())
        name = archive.restore(ctx, OPERATOR, source, "copy")
        assert audit.entries(ctx)[-1].action == "federation.import"
        return Desk(db, self.PLAN.model_copy(update={"name": name}), create=False)

    def test_keeps_what_ends_a_federation_early(self, clean_db: Database, tmp_path: Path) -> None:
        original = Desk(clean_db, fedavg_plan(count=9, patience=2))
        north = original.join("north")
        for number, correct in enumerate([8, 5]):
            evaluations.submit(original.ctx, north, number, measured(correct))
            original.run_round({north: number})
        archive.export(original.ctx, OPERATOR, original.name, tmp_path / "export")
        copy = Desk(clean_db, original.plan.model_copy(update={"name": "copy"}), create=False)
        archive.restore(copy.ctx, OPERATOR, tmp_path / "export", "copy")
        assert (copy.view.best_accuracy, copy.view.best_model) == (0.8, 0)
        again = copy.join("north")
        federations.resume(copy.ctx, OPERATOR, "copy")
        for desk, who in ((original, north), (copy, again)):
            evaluations.submit(desk.ctx, who, 2, measured(5))
            desk.run_round({who: 2})
            assert (desk.view.state, desk.view.rounds_done) == ("finished", 3)

    def test_holds_what_people_want_to_see(self, clean_db: Database, tmp_path: Path) -> None:
        desk = Desk(clean_db, self.PLAN)
        sites = [desk.join("north", cat=9, dog=1), desk.join("south", cat=2, dog=8)]
        self.run_rounds(desk, sites, range(1, 2))
        target = archive.export(desk.ctx, OPERATOR, desk.name, tmp_path / "export")
        files = {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()}
        assert files == {
            "federation.json",
            "history.csv",
            "history.json",
            "model.safetensors",
            "offsets/north.safetensors",
            "offsets/south.safetensors",
            "plan.json",
            "server-state.safetensors",
        }
        assert FederationPlan.model_validate_json((target / "plan.json").read_text()) == desk.plan
        assert (target / "history.csv").read_text().count("\n") == 3
        served = tasks.serving_personal(desk.ctx, sites[0], desk.name, 1)
        exported = safetensors.torch.load((target / "offsets/north.safetensors").read_bytes())
        assert exported["offset"].equal(safetensors.torch.load(blobs.read_all(desk.db, served.id))["offset"])

    def test_finished_stays_finished(self, clean_db: Database, tmp_path: Path) -> None:
        desk = Desk(clean_db, fedavg_plan(count=1))
        desk.run_round({desk.join("north"): 1})
        archive.export(desk.ctx, OPERATOR, desk.name, tmp_path / "export.zip")
        archive.restore(desk.ctx, OPERATOR, tmp_path / "export.zip", "copy")
        assert federations.show(desk.ctx, "copy").state == "finished"

    def test_finished_early_stays_finished_and_says_why(self, clean_db: Database, tmp_path: Path) -> None:
        desk = Desk(clean_db, fedavg_plan(count=9, target_accuracy=0.5))
        north = desk.join("north")
        evaluations.submit(desk.ctx, north, 0, measured(6))
        desk.run_round({north: 1})
        assert (desk.view.state, desk.view.rounds_done) == ("finished", 1)
        archive.export(desk.ctx, OPERATOR, desk.name, tmp_path / "export.zip")
        archive.restore(desk.ctx, OPERATOR, tmp_path / "export.zip", "copy")
        copy = federations.show(desk.ctx, "copy")
        assert (copy.state, copy.reason, copy.rounds_done) == ("finished", desk.view.reason, 1)
        assert "reached the target 0.5" in copy.reason

    def test_cancelled_stays_cancelled(self, clean_db: Database, tmp_path: Path) -> None:
        desk = Desk(clean_db)
        federations.cancel(desk.ctx, OPERATOR, desk.name)
        archive.export(desk.ctx, OPERATOR, desk.name, tmp_path / "export")
        archive.restore(desk.ctx, OPERATOR, tmp_path / "export", "copy")
        copy = federations.show(desk.ctx, "copy")
        assert (copy.state, copy.reason) == ("cancelled", "cancelled by the operator")

    def test_does_not_give_the_number_of_a_failed_round_again(self, clean_db: Database, tmp_path: Path) -> None:
        """A site that uploaded to round 3 of the original must not meet another round 3."""
        desk = Desk(clean_db)
        north = desk.join("north")
        desk.run_round({north: 1})
        for _ in range(2):
            desk.let_pass(60)
            assert desk.view.state == "paused"
            federations.resume(desk.ctx, OPERATOR, desk.name)
        assert desk.round.number == 4, "it is open, so its number has not been used up"
        archive.export(desk.ctx, OPERATOR, desk.name, tmp_path / "export")
        archive.restore(desk.ctx, OPERATOR, tmp_path / "export", "copy")
        copy = Desk(clean_db, desk.plan.model_copy(update={"name": "copy"}), desk.clock, create=False)
        again = copy.join("north")
        federations.resume(copy.ctx, OPERATOR, "copy")
        assert (copy.round.number, copy.rounds()[-1].base_model) == (4, 1)
        copy.run_round({again: 5})
        rows = [(row.number, row.state) for row in copy.rounds()]
        assert rows == [(2, "failed"), (3, "failed"), (4, "done"), (5, "open")]
        assert [model.number for model in copy.models()] == [1, 4]
        assert len(reports.rounds(copy.ctx, "copy", again.client_id, 0, 10)) == 4

    @pytest.mark.parametrize("method", METHODS)
    def test_of_every_method_comes_back(self, clean_db: Database, tmp_path: Path, method: str) -> None:
        """What a round leaves behind at the coordinator is what `private_spec` says that it must be."""
        tiny = {"generator": TINY_NETWORK["generator"] | {"optimizer": "adam"}} if method == "distrans" else {}
        desk = Desk(clean_db, small_plan(method={"name": method, **tiny}, rounds={"count": 3}))
        desk.run_round({desk.join("north"): 1})
        archive.export(desk.ctx, OPERATOR, desk.name, tmp_path / "export")
        archive.restore(desk.ctx, OPERATOR, tmp_path / "export", "copy")
        copy = Desk(clean_db, desk.plan.model_copy(update={"name": "copy"}), create=False)
        assert (copy.bits(), copy.private_bits()) == (desk.bits(), desk.private_bits())

    def test_refuses_server_state_that_does_not_fit_the_plan(self, clean_db: Database, tmp_path: Path) -> None:
        """Here and now, not as an aggregation that fails rounds later."""
        desk = Desk(clean_db, self.PLAN)
        self.run_rounds(desk, [desk.join("north"), desk.join("south")], range(1, 2))
        archive.export(desk.ctx, OPERATOR, desk.name, tmp_path / "export")
        file = tmp_path / "export" / "server-state.safetensors"
        good = safetensors.torch.load(file.read_bytes())
        assert {name.partition(".")[0] for name in good} == {"generator", "offset"}
        for bad, words in (
            ({name: value for name, value in good.items() if "mlp.0" not in name}, "lacks"),
            (good | {"generator.net.extra": torch.zeros(1)}, "unknown"),
            (good | {"offset.of.north": torch.zeros(1, 7, 7)}, "has shape [1, 7, 7]"),
            (good | {"offset.mean": torch.full((1, 14, 14), torch.nan)}, "not finite"),
            ({name: value.double() for name, value in good.items()}, "has dtype"),
            ({}, "server-state.safetensors is missing or empty"),
            (None, "server-state.safetensors is missing or empty"),
            (b"damaged", "does not fit its plan"),
        ):
            if bad is None:
                file.unlink()
            else:
                file.write_bytes(bad if isinstance(bad, bytes) else encode(bad))
            error = refused(
                InvalidInput, "not-an-export", lambda: archive.restore(desk.ctx, OPERATOR, tmp_path / "export", "copy")
            )
            assert error.message.startswith("The server state in ")
            assert words in str(error)
        assert [view.name for view in federations.list_all(desk.ctx)] == [desk.name]

    def test_refuses_to_overwrite(self, clean_db: Database, tmp_path: Path) -> None:
        desk = Desk(clean_db)
        refused(Conflict, "target-exists", lambda: archive.export(desk.ctx, OPERATOR, desk.name, tmp_path))
        archive.export(desk.ctx, OPERATOR, desk.name, tmp_path / "export")
        refused(Conflict, "name-taken", lambda: archive.restore(desk.ctx, OPERATOR, tmp_path / "export"))

    def test_refuses_what_is_no_export(self, clean_db: Database, tmp_path: Path) -> None:
        desk = Desk(clean_db)
        archive.export(desk.ctx, OPERATOR, desk.name, tmp_path / "good")
        other = small_plan("other", method=FEDAVG, classes=("a", "b", "c"))
        faults = {
            "federation.json": (b"{}", "not-an-export"),
            "plan.json": (b"no json", "not-an-export"),
            "model.safetensors": (update_body(other, {}, 1), "not-an-export"),
        }
        for name, (data, code) in faults.items():
            bad = tmp_path / f"bad-{name}"
            shutil.copytree(tmp_path / "good", bad)
            (bad / name).write_bytes(data)
            refused(InvalidInput, code, lambda: archive.restore(desk.ctx, OPERATOR, bad, "copy"))  # noqa: B023
        (tmp_path / "bad.zip").write_bytes(b"no zip")
        refused(InvalidInput, "unreadable", lambda: archive.restore(desk.ctx, OPERATOR, tmp_path / "bad.zip"))
        refused(InvalidInput, "unreadable", lambda: archive.restore(desk.ctx, OPERATOR, tmp_path / "absent"))
        assert [view.name for view in federations.list_all(desk.ctx)] == [desk.name]


@pytest.fixture
def empty_db(empty_db_url: str) -> Iterator[Database]:
    database = Database(empty_db_url)
    yield database
    database.close()


def revision_of(db: Database, revision: str) -> None:
    with db.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})


class TestSchema:
    def test_of_an_empty_database_is_refused_with_the_command(self, empty_db: Database) -> None:
        with pytest.raises(DatabaseError) as caught:
            schema.require_current(empty_db)
        assert str(caught.value) == "The database is empty. Run: distrans-server db upgrade"
        before, after = schema.upgrade(empty_db)
        assert (before, after) == (None, schema.current_version(empty_db))
        schema.require_current(empty_db)
        assert schema.upgrade(empty_db) == (after, after), "twice is once"

    def test_of_a_newer_release_is_refused(self, empty_db: Database) -> None:
        schema.upgrade(empty_db)
        revision_of(empty_db, "9999")
        for step in (schema.require_current, schema.upgrade):
            with pytest.raises(DatabaseError, match="schema 9999, newer than this program knows") as caught:
                step(empty_db)
            assert caught.value.next_step == "Install the newer release: pip install --upgrade distrans"

    def test_of_an_older_release_is_refused_with_the_command(
        self, empty_db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A release with one more migration, as the next one will be."""
        schema.upgrade(empty_db)
        folder = tmp_path / "migrations"
        shutil.copytree(str(schema._config().get_main_option("script_location")), folder)
        head = schema.current_version(empty_db)
        (folder / "versions" / "9999_next.py").write_text(
            f'from alembic import op\nrevision = "9999"\ndown_revision = "{head}"\n'
            'def upgrade():\n    op.execute("CREATE TABLE next_release (id INTEGER)")\n'
        )
        config = Config()
        config.set_main_option("script_location", str(folder))
        monkeypatch.setattr(schema, "_config", lambda: config)
        with pytest.raises(DatabaseError) as caught:
            schema.require_current(empty_db)
        assert str(caught.value) == f"The database has schema {head}, older than 9999. Run: distrans-server db upgrade"
        assert schema.upgrade(empty_db) == (head, "9999")
        schema.require_current(empty_db)

    def test_of_the_migrations_is_the_schema_of_the_tables(self, empty_db: Database) -> None:
        """A table that was changed without a migration shows up here."""
        schema.upgrade(empty_db)
        config = schema._config()
        with empty_db.engine.connect() as connection:
            config.attributes["connection"] = connection
            command.check(config)

    def test_names_leave_the_reasons_of_an_older_release(self, empty_db: Database) -> None:
        """Clients read reasons; what the first release wrote into them is not theirs to read."""
        config = schema._config()
        with empty_db.engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "0001")
            for name, reason in (("a", "round 1 failed: too few; missing: north, south"), ("b", "tea")):
                connection.execute(
                    text(
                        "INSERT INTO federations (name, plan, state, reason, created_at, state_since, completed_rounds,"
                        " stale_rounds, version) VALUES (:name, '', 'paused', :reason, 0, 0, 0, 0, 0)"
                    ),
                    {"name": name, "reason": reason},
                )
        schema.upgrade(empty_db)
        with empty_db.read() as session:
            rows = session.execute(select(Federation).order_by(Federation.name)).scalars()
            found = [(row.reason, row.reason_detail) for row in rows]
        assert found == [("round 1 failed: too few", "missing: north, south"), ("tea", "")]

    def test_can_be_taken_back(self, empty_db: Database) -> None:
        for _ in range(2):
            schema.upgrade(empty_db)
            config = schema._config()
            with empty_db.engine.begin() as connection:
                config.attributes["connection"] = connection
                command.downgrade(config, "base")
            assert schema.current_version(empty_db) is None


def test_transfers_of_ended_rounds_do_not_pile_up(clean_db: Database) -> None:
    desk = Desk(clean_db, fedavg_plan(min_clients=2, quorum=0.5))
    sites = [desk.join("north"), desk.join("south")]
    body = desk.body(1)
    for _ in range(3):
        part = UploadPart(desk.ctx, sites[1], desk.round.id, 0, len(body), "0" * 64)
        part.feed(body[:100])
        desk.upload(sites[0], 1)
        desk.let_pass(60)
        desk.aggregate()
        assert count(clean_db, Transfer) == [1]
        housekeeping.clean(desk.ctx, Retention())
        assert count(clean_db, Transfer) == [0]
