"""What the coordinator learns about a decision."""

from pathlib import Path
from typing import Any

import pytest
from support.digit_sites import digits_data, federation_model, make_context, new_state

from client_agent.own_training import OwnTraining
from client_agent.scores import ScoreReporter
from client_agent.state.decisions import GateDecision
from client_agent.state.folder import StateFolder
from client_agent.state.kept_models import Bundle
from shared.contract.measurements import EvaluationReport

DATA = digits_data(24, 30)


class Coordinator:
    """Collects reports."""

    def __init__(self) -> None:
        self.reports: list[EvaluationReport] = []

    def report_evaluation(self, number: int, report: EvaluationReport) -> None:
        assert number == 4
        self.reports.append(report)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> StateFolder:
    """A site whose own model is as old as the federation's."""
    folder: Path = tmp_path_factory.mktemp("scores")
    state = new_state(folder / "north")
    OwnTraining(make_context(state, adapt="off")).use_pause(federation_model(4), DATA, lambda: False, is_over=False)
    state.models.save(federation_model(4), keep=5)
    make_context(state).gate.consider(federation_model(4), DATA)
    return state


def decided(state: StateFolder) -> tuple[Bundle, GateDecision]:
    return federation_model(4), state.models.history()[-1]


def send(state: StateFolder, coordinator: Any, share: str) -> None:
    ScoreReporter(make_context(state, share_verdict=share)).report(coordinator, *decided(state))


@pytest.mark.parametrize(
    ("share", "fields"), [("none", set()), ("counts", {"paired"}), ("full", {"paired", "candidate"})]
)
def test_a_site_decides_what_it_shares(state: StateFolder, share: str, fields: set[str]) -> None:
    coordinator = Coordinator()
    send(state, coordinator, share)
    (report,) = coordinator.reports
    _, decision = decided(state)
    assert {name for name in ("paired", "candidate") if getattr(report, name) is not None} == fields
    assert report.samples == 30
    assert report.candidate in (None, decision.candidate)
    assert decision.with_offset is not None
    assert report.model_dump(exclude={"paired", "candidate"}) == decision.with_offset.model_dump()


def test_a_verdict_is_not_shared_while_the_own_model_is_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    state = new_state(tmp_path / "late")
    OwnTraining(make_context(state, adapt="off")).use_pause(federation_model(1), DATA, lambda: False, is_over=False)
    state.models.save(federation_model(4), keep=5)
    make_context(state).gate.consider(federation_model(4), DATA)
    coordinator = Coordinator()
    send(state, coordinator, "full")
    assert coordinator.reports[0].paired is None
    assert "(so far; this site's own model has taken 3 of 12 steps)" in caplog.text


def test_an_unmeasured_model_is_not_reported(state: StateFolder) -> None:
    coordinator: Any = Coordinator()
    bundle, decision = decided(state)
    ScoreReporter(make_context(state)).report(coordinator, bundle, decision.model_copy(update={"with_offset": None}))
    assert coordinator.reports == []
