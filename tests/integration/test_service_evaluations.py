"""Evaluations that clients submit."""

import pytest
from support.desk import (
    Desk,
    fedavg_plan,
    measured,
    refused,
)

from server.core.errors import InvalidInput, NotFound
from server.service.measurements import evaluations, reports
from server.store.database import Database
from shared.contract.measurements import EvaluationReport


class TestEvaluation:
    @pytest.mark.parametrize(
        "result",
        [
            EvaluationReport(samples=9, correct=10, loss_sum=1),
            EvaluationReport(samples=10, correct=5, loss_sum=1, negatives=11),
            EvaluationReport(samples=10, correct=5, loss_sum=1, negatives=8, negatives_correct=6),
            EvaluationReport(samples=10, correct=5, loss_sum=1, negatives=4, negatives_correct=3, negatives_as_own=2),
            EvaluationReport(samples=10, correct=0, loss_sum=1, negatives=4, negatives_as_own=5),
            EvaluationReport(samples=0, correct=0, loss_sum=1, negatives=1),
        ],
    )
    def test_that_contradicts_itself_is_refused(self, clean_db: Database, result: EvaluationReport) -> None:
        desk = Desk(clean_db)
        north = desk.join("north")
        refused(InvalidInput, "inconsistent-evaluation", lambda: evaluations.submit(desk.ctx, north, 0, result))

    def test_of_a_model_that_does_not_exist_is_refused(self, clean_db: Database) -> None:
        desk = Desk(clean_db)
        north = desk.join("north")
        refused(NotFound, "no-such-model", lambda: evaluations.submit(desk.ctx, north, 1, measured(1)))

    def test_again_replaces_the_first(self, clean_db: Database) -> None:
        desk = Desk(clean_db, fedavg_plan(min_clients=2))
        north, south = desk.join("north"), desk.join("south", cat=20, dog=20)
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
