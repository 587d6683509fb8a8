"""When a new model takes the served one's place."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from client_agent.history import HistoryLine
from client_agent.kept_models import Bundle
from client_agent.model_gate import ModelGate
from client_agent.serving import PredictionQueue
from client_agent.settings import Connection, Identity, RunOptions
from client_agent.state import StateFolder
from shared.evaluation import Evaluation
from shared.methods import server_half
from shared.methods.base import ClientRecord
from shared.plan import validate_plan
from shared.runtime import Runtime

PLAN = validate_plan(
    {
        "name": "pets",
        "classes": ["cat", "dog"],
        "image": {"channels": 1, "height": 16, "width": 16},
        "method": {"offset_aggregation": "none"},
    }
)


def score(correct: int) -> Evaluation:
    return Evaluation(samples=100, correct=correct, loss_sum=1.0)


def bundle(number: int) -> Bundle:
    half, me = server_half(PLAN), ClientRecord("north", (1, 1))
    state, facts = half.initial_state(), half.facts([me])
    return Bundle(number, f"digest-{number}", state.shared, half.personal(state, me, [me], facts), {}, facts)


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    folder = StateFolder(tmp_path)
    folder.create(
        Identity(
            client_id="1", name="north", token="t", federation="pets", plan=PLAN,
            connection=Connection(server="http://127.0.0.1:9"), data="sklearn:digits",
        )
    )  # fmt: skip
    return folder


@pytest.fixture
def predictions() -> Iterator[PredictionQueue]:
    one = PredictionQueue(1, 1, 1)
    yield one
    one.stop()


def make_gate(state: StateFolder, predictions: PredictionQueue | None, margin: float | None = 0.1) -> ModelGate:
    return ModelGate(state, state.identity(), Runtime(), RunOptions(max_accuracy_drop=margin), predictions)


@pytest.fixture
def gate(state: StateFolder, predictions: PredictionQueue) -> ModelGate:
    return make_gate(state, predictions)


def bring(gate: ModelGate, state: StateFolder, number: int) -> HistoryLine:
    """A new model arrives."""
    one = bundle(number)
    state.save_bundle(one, keep=9)
    return gate.consider(one, None)


def served(gate: ModelGate) -> int | None:
    return None if gate.served is None else gate.served.number


@pytest.mark.parametrize(
    ("margin", "correct", "approved"),
    [(0.1, 95, True), (0.1, 80, True), (0.1, 79, False), (0.0, 90, True), (0.0, 89, False), (None, 0, True)],
)
def test_a_model_that_scores_worse_by_more_than_the_margin_is_held_back(
    state: StateFolder, margin: float | None, correct: int, approved: bool
) -> None:
    state.add_history(HistoryLine(model=3, with_offset=score(90), without_offset=None))
    state.add_history(HistoryLine(model=4, with_offset=score(20), without_offset=None, served=False, reason="worse"))
    reason = make_gate(state, None, margin)._objection(score(correct))
    assert (reason == "") is approved
    if not approved:
        assert f"it scores {correct / 100:.1%} where model 3 has 90.0%" in reason


def test_new_models_are_served_as_they_come(gate: ModelGate, state: StateFolder) -> None:
    for number in range(3):
        assert bring(gate, state, number).served
        assert served(gate) == number


def test_a_pin_holds_new_models_back_and_afterwards_the_newest_is_served(gate: ModelGate, state: StateFolder) -> None:
    bring(gate, state, 0)
    bring(gate, state, 1)
    state.pin(0)
    gate.serve_kept()
    assert served(gate) == 0
    line = bring(gate, state, 2)
    assert (line.served, line.reason) == (False, "/predict is pinned to model 0")
    assert served(gate) == 0
    state.pin(None)
    gate.serve_kept()
    assert served(gate) == 2


def test_a_restart_serves_what_was_served_before(
    gate: ModelGate, state: StateFolder, predictions: PredictionQueue
) -> None:
    for number in range(3):
        bring(gate, state, number)
    state.add_history(HistoryLine(model=2, with_offset=score(1), without_offset=None, served=False, reason="worse"))
    predictions.model = None
    make_gate(state, predictions).serve_kept()
    assert served(gate) == 1


def test_a_broken_model_leaves_the_served_one_in_place(
    gate: ModelGate, state: StateFolder, caplog: pytest.LogCaptureFixture
) -> None:
    bring(gate, state, 0)
    broken = bundle(1)
    broken.shared["logits.bias"][0] = float("nan")
    line = gate.consider(broken, None)
    assert not line.approved
    assert "finite" in line.reason
    assert "model 1 is not served" in caplog.text
    assert served(gate) == 0


def test_a_kept_model_that_is_gone_is_said(
    gate: ModelGate, state: StateFolder, caplog: pytest.LogCaptureFixture
) -> None:
    bring(gate, state, 0)
    (state.path / "pin").write_text("7")
    gate.serve_kept()
    assert "the kept model 7 cannot be served" in caplog.text
    assert served(gate) == 0


def test_without_any_model_nothing_is_served(gate: ModelGate) -> None:
    gate.serve_kept()
    assert gate.served is None
