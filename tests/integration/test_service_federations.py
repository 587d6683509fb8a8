"""The life of a federation against real databases: pause, resume, cancel, finish."""

from collections.abc import Callable

import pytest
from support.desk import (
    OPERATOR,
    Clock,
    Desk,
    fedavg_plan,
    mean_bits,
    measured,
    put,
    refused,
)

from server.core.errors import Conflict, Gone, NotFound
from server.service import audit, federations, tasks
from server.service.context import Context, Identity
from server.service.measurements import evaluations
from server.store.database import Database


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
        desk.wait(1000)
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
            desk.wait(100)
            federations.pause(desk.ctx, OPERATOR, desk.name)
            desk.wait(100)
            federations.resume(desk.ctx, OPERATOR, desk.name)
            desk.wait(1)
            federations.resume(desk.ctx, OPERATOR, desk.name)
        assert desk.round.deadline_at == deadline + 600

    def test_of_a_round_past_its_deadline_ends_it_when_resumed(self, desk: Desk, sites: list[Identity]) -> None:
        del sites
        desk.wait(60)
        federations.pause(desk.ctx, OPERATOR, desk.name)  # before the coordinator checked the deadline
        desk.wait(60)
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

    def test_every_action_is_idempotent(self, clean_db: Database) -> None:
        desk = Desk(clean_db, start=False)
        north = desk.join("north")
        for action in self.ACTIONS:
            action(desk.ctx, OPERATOR, desk.name)
            before = desk.view, len(audit.entries(desk.ctx))
            desk.wait(1)
            action(desk.ctx, OPERATOR, desk.name)
            after = desk.view, len(audit.entries(desk.ctx))
            assert after[1] == before[1]
            assert after[0].state_since == before[0].state_since
        assert [row.number for row in desk.rounds()] == [1]
        assert tasks.task(desk.ctx, north).action == "cancelled"

    @pytest.mark.parametrize(
        ("before", "wrong", "why"),
        [
            ((), (federations.pause, federations.resume), "has not been started and cannot"),
            ((federations.start, federations.pause), (federations.start,), "is paused and cannot"),
            (
                (federations.cancel,),
                (federations.start, federations.pause, federations.resume),
                "was cancelled and can no longer",
            ),
        ],
    )
    def test_an_action_in_the_wrong_state_is_a_conflict(
        self,
        clean_db: Database,
        before: tuple[Callable[..., None], ...],
        wrong: tuple[Callable[..., None], ...],
        why: str,
    ) -> None:
        desk = Desk(clean_db, start=False)
        for action in before:
            action(desk.ctx, OPERATOR, desk.name)
        view = desk.view
        for action in wrong:
            error = refused(Conflict, "wrong-state", lambda: action(desk.ctx, OPERATOR, desk.name))  # noqa: B023
            assert error.message == f"Federation {desk.name!r} {why} be {action.__name__.rstrip('e')}ed."
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
    def test_comes_at_the_target_accuracy(self, clean_db: Database) -> None:
        """The accuracy of a model is known once the round that started from it has ended."""
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

    def test_comes_at_the_target_accuracy_although_a_round_failed(self, clean_db: Database) -> None:
        """A failed round leaves a gap in the model numbers."""
        desk = Desk(clean_db, fedavg_plan(count=10, target_accuracy=0.9))
        north = desk.join("north")
        desk.run_round({north: 1})
        desk.let_pass(60)
        federations.resume(desk.ctx, OPERATOR, desk.name)
        evaluations.submit(desk.ctx, north, 1, measured(9))
        desk.run_round({north: 2})
        assert [model.number for model in desk.models()] == [0, 1, 3]
        assert (desk.view.state, desk.view.best_model) == ("finished", 1)

    def test_comes_when_patience_runs_out(self, clean_db: Database) -> None:
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
        evaluations.submit(desk.ctx, sites[0], 2, measured(10))  # only one site, which happens to be the easy one
        assert (desk.view.best_accuracy, desk.view.best_model) == (0.7, 1)
        evaluations.submit(desk.ctx, sites[1], 2, measured(6))
        assert (desk.view.best_accuracy, desk.view.best_model) == (0.8, 2)

    def test_does_not_come_while_nobody_has_measured_anything(self, clean_db: Database) -> None:
        desk = Desk(clean_db, fedavg_plan(count=4, patience=1, target_accuracy=0.1))
        north = desk.join("north")
        for seed in range(3):
            desk.run_round({north: seed})
        assert (desk.view.state, desk.view.best_accuracy) == ("running", None)
