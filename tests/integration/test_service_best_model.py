"""The best model: the one with the highest pooled accuracy over the counted clients."""

import pytest
from support.desk import OPERATOR, Desk, fedavg_plan, measured
from support.many_rows import statements

from server.service import best_model, clients, federations, queries, rollback
from server.service.context import Identity
from server.service.measurements import evaluations, reports
from server.store.database import Database


@pytest.fixture
def desk(clean_db: Database) -> Desk:
    return Desk(clean_db, fedavg_plan(count=4, min_clients=2))


@pytest.fixture
def sites(desk: Desk) -> list[Identity]:
    federations.pause(desk.ctx, OPERATOR, desk.name)
    joined = [desk.join(name) for name in ("east", "north", "south")]
    federations.resume(desk.ctx, OPERATOR, desk.name)
    return joined


def run(desk: Desk, number: int, scores: dict[Identity, int]) -> None:
    """Let every site measure the newest model, then train a round."""
    for who, correct in scores.items():
        evaluations.submit(desk.ctx, who, number, measured(correct))
    desk.run_round({who: 10 * number + place for place, who in enumerate(scores)})


def best(desk: Desk) -> tuple[float | None, int | None]:
    return desk.view.best_accuracy, desk.view.best_model


def shown(desk: Desk) -> list[float | None]:
    found = reports.rounds(desk.ctx, desk.name, None, 0, 100)
    return [round_.evaluation.accuracy if round_.evaluation else None for round_ in found if round_.state == "done"]


class TestRevocation:
    def test_recomputes_the_best_model_without_its_measurements(self, desk: Desk, sites: list[Identity]) -> None:
        """South's images are easy for model 1; without them model 2 is better."""
        east, north, south = sites
        run(desk, 0, {east: 1, north: 1, south: 1})
        run(desk, 1, {east: 4, north: 4, south: 10})
        run(desk, 2, {east: 5, north: 6, south: 6})
        assert best(desk) == (pytest.approx(0.6), 1)
        clients.revoke(desk.ctx, OPERATOR, desk.name, "south")
        assert best(desk) == (pytest.approx(0.55), 2)
        assert shown(desk) == [pytest.approx(0.4), pytest.approx(0.55), None], "the table agrees with the headline"

    def test_does_not_keep_the_last_model_from_being_judged(self, desk: Desk, sites: list[Identity]) -> None:
        """Fewer sites measured it than the model before, and it still becomes the best one."""
        east, north, south = sites
        for number in range(3):
            run(desk, number, {east: 4 + number, north: 4 + number, south: 4 + number})
        evaluations.submit(desk.ctx, south, 3, measured(5))
        desk.upload(south, 77)
        clients.revoke(desk.ctx, OPERATOR, desk.name, "south")
        run(desk, 3, {east: 7, north: 7})
        assert desk.view.state == "finished"
        for who in (east, north):
            evaluations.submit(desk.ctx, who, 4, measured(9))
        assert best(desk) == (pytest.approx(0.9), 4)

    def test_after_the_end_counts_the_last_model_that_all_others_have_measured(
        self, desk: Desk, sites: list[Identity]
    ) -> None:
        east, north, south = sites
        for number in range(4):
            run(desk, number, {east: 5, north: 5, south: 5})
        for who in (east, north):
            evaluations.submit(desk.ctx, who, 4, measured(9))
        assert best(desk) == (pytest.approx(0.5), 0), "south may have the difficult images"
        clients.revoke(desk.ctx, OPERATOR, desk.name, "south")
        assert best(desk) == (pytest.approx(0.9), 4)

    def test_starts_the_patience_over_with_the_model_that_is_then_best(self, clean_db: Database) -> None:
        desk = Desk(clean_db, fedavg_plan(count=20, patience=3))
        east, liar = desk.join("east"), desk.join("liar")
        desk.run_round({east: 99})  # the first round opened with east only
        evaluations.submit(desk.ctx, liar, 1, measured(10))
        for number, correct in ((1, 3), (2, 4), (3, 5)):
            run(desk, number, {east: correct, liar: 0 if number > 1 else 10})
        assert best(desk)[1] == 1
        clients.revoke(desk.ctx, OPERATOR, desk.name, "liar")
        assert best(desk) == (pytest.approx(0.5), 3)
        run(desk, 4, {east: 4})
        assert desk.view.state == "running", "one round without improvement"


class TestLeaving:
    def test_a_running_federation_is_like_a_revocation(self, desk: Desk, sites: list[Identity]) -> None:
        east, north, south = sites
        run(desk, 0, {east: 1, north: 1, south: 10})
        run(desk, 1, {east: 3, north: 3, south: 3})
        assert best(desk)[1] == 0
        clients.leave(desk.ctx, south, OPERATOR)
        assert best(desk) == (pytest.approx(0.3), 1)

    def test_a_finished_federation_changes_nothing(self, desk: Desk, sites: list[Identity]) -> None:
        for number in range(4):
            run(desk, number, dict.fromkeys(sites, number))
        for who in sites:
            evaluations.submit(desk.ctx, who, 4, measured(9))
        before = best(desk), shown(desk)
        for who in sites:
            clients.leave(desk.ctx, who, OPERATOR)
        assert (best(desk), shown(desk)) == before

    def test_a_finished_federation_counts_once_it_is_rolled_back(self, desk: Desk, sites: list[Identity]) -> None:
        east, north, south = sites
        for number, easy in enumerate((1, 10, 5, 5)):
            run(desk, number, {east: 2 + number, north: 2 + number, south: easy})
        assert best(desk)[1] == 1
        clients.leave(desk.ctx, south, OPERATOR)
        assert best(desk)[1] == 1
        rollback.roll_back(desk.ctx, OPERATOR, desk.name, 2)
        assert best(desk) == (pytest.approx(0.4), 2), "south will not measure what comes now"


def test_recomputing_the_best_model_takes_a_few_queries_however_many_rounds(clean_db: Database) -> None:
    desk = Desk(clean_db, fedavg_plan(count=30))
    north = desk.join("north")
    south = desk.join("south")
    counts = []
    for number in range(8):
        who = {north: number} if number == 0 else {north: number, south: number + 50}
        for site in who:
            evaluations.submit(desk.ctx, site, number, measured(5))
        desk.run_round(who)
        if number in (2, 7):
            with clean_db.write() as session:
                federation = queries.load_federation(session, desk.name)
                with statements(clean_db) as seen:
                    best_model.exclude_measurements(session, federation)
            counts.append(len(seen))
    assert counts[0] == counts[1] <= 8, counts
