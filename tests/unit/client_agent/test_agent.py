"""When a new model takes the served one's place."""

import threading
from pathlib import Path

import pytest
from rich.console import Console

from client_agent.agent import Agent
from client_agent.coordinator import Coordinator
from client_agent.network import open_http
from client_agent.settings import Connection, Identity, RunOptions
from client_agent.state import HistoryLine, StateFolder
from shared.evaluation import Evaluation
from shared.plan import validate_plan
from shared.runtime import Runtime


def score(correct: int) -> Evaluation:
    return Evaluation(samples=100, correct=correct, loss_sum=1.0)


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    folder = StateFolder(tmp_path)
    plan = validate_plan({"name": "pets", "classes": ["cat", "dog"], "image": {"height": 16, "width": 16}})
    folder.create(
        Identity(
            client_id="1", name="north", token="t", federation="pets", plan=plan,
            connection=Connection(server="http://127.0.0.1:9"), data="sklearn:digits",
        )
    )  # fmt: skip
    return folder


def agent(state: StateFolder, margin: float | None) -> Agent:
    identity, stopping = state.identity(), threading.Event()
    coordinator = Coordinator(open_http(identity.connection), stopping)
    options = RunOptions(max_accuracy_drop=margin)
    made = Agent(state, identity, coordinator, None, Runtime(), options, Console(), stopping)
    made._served_score = score(90)
    return made


@pytest.mark.parametrize(
    ("margin", "correct", "served"),
    [(0.1, 95, True), (0.1, 80, True), (0.1, 79, False), (0.0, 90, True), (0.0, 89, False), (None, 0, True)],
)
def test_a_model_that_scores_worse_by_more_than_the_margin_is_held_back(
    state: StateFolder, margin: float | None, correct: int, served: bool
) -> None:
    reason = agent(state, margin)._objection(score(correct))
    assert (reason == "") is served
    if not served:
        assert f"{correct / 100:.1%}" in reason
        assert "90.0%" in reason


def test_a_pin_holds_every_new_model_back(state: StateFolder) -> None:
    (state.path / "pin").write_text("3")
    assert "pinned to model 3" in agent(state, None)._objection(score(100))


def test_info_tells_what_each_model_scored(state: StateFolder) -> None:
    state.add_history(HistoryLine(model=1, with_offset=score(91), without_offset=score(80), local=score(85)))
    info = agent(state, 0.1).info()
    assert info["history"] == [
        {"model": 1, "with_offset": 0.91, "without_offset": 0.8, "local": 0.85, "served": True, "reason": ""}
    ]
    assert info["serving"] is None
