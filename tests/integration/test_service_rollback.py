"""Rolling back to an older model removes nothing, gives agents a new model, and restores the round count."""

import pytest
from support.api import open_api, problem_of
from support.crashes import InterruptibleAggregator, at
from support.desk import (
    MEAN_OFFSETS,
    OPERATOR,
    Clock,
    Desk,
    aggregate_until_idle,
    fedavg_plan,
    measured,
    refused,
    unreferenced_blobs,
)
from support.plans import small_plan, update_body

from server.core.errors import Conflict, NotFound
from server.service import audit, downloads, federations, rollback, tasks
from server.service.cleaning import Cleaner
from server.service.context import Context, Identity
from server.service.measurements import evaluations, reports
from server.service.retention import KEPT_STATES, Retention
from server.store.database import Database


@pytest.fixture
def desk(clean_db: Database) -> Desk:
    return Desk(clean_db, small_plan(method=MEAN_OFFSETS, rounds={"count": 20, "min_clients": 2}))


@pytest.fixture
def sites(desk: Desk) -> list[Identity]:
    return [desk.join("north"), desk.join("south")]


def run_rounds(desk: Desk, sites: list[Identity], count: int, seed: int = 0) -> None:
    for number in range(count):
        desk.run_round({who: seed + 10 * number + place for place, who in enumerate(sites)})


class TestRollback:
    def test_publishes_the_old_model_under_the_next_number(self, desk: Desk, sites: list[Identity]) -> None:
        run_rounds(desk, sites, 3)
        old = desk.bits(1), desk.private_bits(1), downloads.round_personal(desk.ctx, sites[0], desk.round.id)
        assert all(old)
        rollback.roll_back(desk.ctx, OPERATOR, desk.name, 1)
        assert (desk.view.state, desk.view.reason) == ("paused", "rolled back to model 1")
        assert (desk.view.rounds_done, desk.view.latest_model, desk.view.round) == (1, 5, None)
        assert (desk.bits(), desk.private_bits(5)) == old[:2]
        states = [(row.number, row.state, row.reason) for row in desk.rounds()[3:]]
        assert states == [(4, "failed", "rolled back to model 1"), (5, "done", "rolled back to model 1")]
        (entry,) = [entry for entry in audit.entries(desk.ctx) if entry.action == "federation.rollback"]
        assert (entry.actor, entry.detail) == ("operator", '{"model": 5, "to": 1}')
        task = tasks.task(desk.ctx, sites[0])
        assert task.model is not None
        assert (task.action, task.model.number) == ("paused", 5)
        assert downloads.serving_personal(desk.ctx, sites[0], desk.name, 5).size_bytes == old[2].size_bytes

        federations.resume(desk.ctx, OPERATOR, desk.name)
        assert (desk.round.number, desk.rounds()[-1].base_model) == (6, 5)
        run_rounds(desk, sites, 2, seed=500)
        assert desk.view.rounds_done == 3
        assert len(reports.rounds(desk.ctx, desk.name, None, 0, 100)) == 8

    def test_continues_bit_for_bit_as_if_it_had_never_gone_wrong(self, desk: Desk, sites: list[Identity]) -> None:
        run_rounds(desk, sites, 1)
        desk.run_round({sites[0]: 77, sites[1]: 78})
        expected = desk.bits(2), desk.private_bits(2)
        assert all(expected)
        rollback.roll_back(desk.ctx, OPERATOR, desk.name, 1)
        federations.resume(desk.ctx, OPERATOR, desk.name)
        desk.run_round({sites[0]: 77, sites[1]: 78})
        assert (desk.bits(), desk.private_bits()) == expected

    def test_makes_an_aggregation_under_way_drop_its_result(self, desk: Desk, sites: list[Identity]) -> None:
        run_rounds(desk, sites, 2)
        for seed, who in enumerate(sites):
            desk.upload(who, seed)

        go_back = at("before-publish", lambda: rollback.roll_back(desk.ctx, OPERATOR, desk.name, 1))
        aggregate_until_idle(InterruptibleAggregator(Context(desk.db, desk.clock), go_back))
        assert [model.number for model in desk.models()] == [0, 1, 2, 4]
        assert (desk.view.state, desk.rounds()[2].state) == ("paused", "failed")
        assert unreferenced_blobs(desk.db) == set()

    def test_of_a_finished_federation_lets_it_continue(self, clean_db: Database) -> None:
        desk = Desk(clean_db, fedavg_plan(count=2))
        north = desk.join("north")
        run_rounds(desk, [north], 2)
        assert desk.view.state == "finished"
        rollback.roll_back(desk.ctx, OPERATOR, desk.name, 1)
        federations.resume(desk.ctx, OPERATOR, desk.name)
        run_rounds(desk, [north], 1)
        assert (desk.view.state, desk.view.rounds_done) == ("finished", 2)

    def test_forgets_the_accuracy_of_what_it_leaves(self, clean_db: Database) -> None:
        """A model with false scores must neither be the best one nor end the federation."""
        desk = Desk(clean_db, fedavg_plan(count=9, target_accuracy=0.95))
        north = desk.join("north")
        for number, correct in enumerate([5, 6, 7]):
            evaluations.submit(desk.ctx, north, number, measured(correct))
            desk.run_round({north: number})
        evaluations.submit(desk.ctx, north, 3, measured(10))
        desk.run_round({north: 9})
        assert (desk.view.state, desk.view.best_accuracy, desk.view.best_model) == ("finished", 1.0, 3)
        rollback.roll_back(desk.ctx, OPERATOR, desk.name, 2)
        assert (desk.view.best_accuracy, desk.view.best_model) == (0.7, 2)
        federations.resume(desk.ctx, OPERATOR, desk.name)
        desk.run_round({north: 10})
        assert (desk.view.state, desk.view.best_accuracy, desk.view.best_model) == ("running", 0.7, 2)

    def test_does_not_count_the_same_accuracy_twice(self, clean_db: Database) -> None:
        """The copy scores the same as the original: that does not count as a round without improvement."""
        desk = Desk(clean_db, fedavg_plan(count=9, patience=1))
        north = desk.join("north")
        for number, correct in enumerate([5, 6]):
            evaluations.submit(desk.ctx, north, number, measured(correct))
            desk.run_round({north: number})
        rollback.roll_back(desk.ctx, OPERATOR, desk.name, 1)
        federations.resume(desk.ctx, OPERATOR, desk.name)
        evaluations.submit(desk.ctx, north, desk.view.latest_model, measured(6))
        desk.run_round({north: 5})
        assert desk.view.state == "running"

    def test_to_the_start(self, desk: Desk, sites: list[Identity]) -> None:
        run_rounds(desk, sites, 2)
        rollback.roll_back(desk.ctx, OPERATOR, desk.name, 0)
        assert (desk.bits(), desk.view.rounds_done) == (desk.bits(0), 0)
        federations.resume(desk.ctx, OPERATOR, desk.name)
        run_rounds(desk, sites, 1)
        assert desk.view.rounds_done == 1

    def test_without_the_server_state_is_refused_with_what_is_possible(self, desk: Desk, sites: list[Identity]) -> None:
        run_rounds(desk, sites, KEPT_STATES + 2)
        error = refused(Conflict, "no-rollback", lambda: rollback.roll_back(desk.ctx, OPERATOR, desk.name, 1))
        assert error.message == "The server state of model 1 is no longer kept."
        assert error.next_step == "Choose one of: 0, 3, 4, 5, 6."
        for number, cause in ((7, "Model 7 is already the newest one."), (8, "has no model 8.")):
            error = refused(Conflict, "no-rollback", lambda: rollback.roll_back(desk.ctx, OPERATOR, desk.name, number))  # noqa: B023
            assert cause in error.message
        rollback.roll_back(desk.ctx, OPERATOR, desk.name, 3)

    def test_keeps_a_state_that_two_models_share(self, desk: Desk, sites: list[Identity]) -> None:
        run_rounds(desk, sites, 2)
        state = desk.private_bits(1)
        assert state is not None
        rollback.roll_back(desk.ctx, OPERATOR, desk.name, 1)
        federations.resume(desk.ctx, OPERATOR, desk.name)
        run_rounds(desk, sites, KEPT_STATES - 1)
        shared = [model.number for model in desk.models() if model.private_blob_id]
        assert 4 in shared, "the copy is among the newest"
        assert 1 not in shared
        rollback.roll_back(desk.ctx, OPERATOR, desk.name, 4)
        assert desk.bits() == desk.bits(1)
        desk.clock.advance(10**6)
        Cleaner(desk.ctx, Retention(keep_round_uploads=99)).clean()
        assert unreferenced_blobs(desk.db) == set()
        assert desk.private_bits(4) == state

    def test_of_a_cancelled_or_unknown_federation_is_refused(self, clean_db: Database) -> None:
        desk = Desk(clean_db)
        run_rounds(desk, [desk.join("north")], 2)
        federations.cancel(desk.ctx, OPERATOR, desk.name)
        refused(Conflict, "wrong-state", lambda: rollback.roll_back(desk.ctx, OPERATOR, desk.name, 1))
        ctx = Context(clean_db, Clock())
        refused(NotFound, "no-such-federation", lambda: rollback.roll_back(ctx, OPERATOR, "nowhere", 1))


def test_rollback_works_over_http(sqlite_url: str) -> None:
    plan = fedavg_plan(count=9)
    with open_api(sqlite_url) as api:
        api.create(plan)
        north = api.join(plan, "north", {"cat": 1})
        for number in range(3):
            task = north.wait_for_round(number + 1)
            if number < 2:
                assert north.put(task.round.id, update_body(plan, {}, number)).status_code == 200
        path = f"/v1/federations/{plan.name}/rollback"
        assert api.call("POST", path, "no-token", json={"to": 1}).status_code == 401
        for body in ({}, {"to": -1}, {"to": True}, {"to": "1"}, {"to": 2**40}):
            assert api.call("POST", path, json=body).status_code == 422
        answer = api.call("POST", path, json={"to": 2})
        assert problem_of(answer) == (409, "no-rollback")
        view = api.admin("POST", path, json={"to": 1})
        assert (view["state"], view["reason"], view["rounds_done"]) == ("paused", "rolled back to model 1", 1)
