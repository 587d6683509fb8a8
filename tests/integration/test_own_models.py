"""Agents that train models of their own: predictions continue, and the served bits survive everything."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.agent_sites import App
from support.agents import AgentProcess, digits_plan, enroll, write_digits
from support.coordinator import CoordinatorProcess, running

from client_agent.state.folder import StateFolder

OLD_FIELDS = ("model", "digest", "fingerprint", "with_offset", "without_offset", "local", "served", "reason")


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    folder = tmp_path_factory.mktemp("coordinator")
    with running(f"sqlite:///{folder / 'coordinator.db'}", folder, forked=True) as process:
        yield process


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("data"), ("0", "1"), every=3)


def wait_for_phase(app: App, phase: str) -> None:
    """Ask until the agent is in this phase, with a model to answer."""
    assert any(
        (info := app.info())["agent"]["phase"] == phase and info["serving"] is not None for _ in range(100_000)
    ), f"it never was in phase {phase}"


def answer(app: App, data: Path) -> Any:
    """Return the answer to one image, without the request's id."""
    found = app.predict(next(data.rglob("*.png")).read_bytes())
    return {name: found[name] for name in ("model", "predictions")}


def test_predictions_continue_in_every_phase_and_kill_9_keeps_their_bits(
    coordinator: CoordinatorProcess, data: Path, tmp_path: Path
) -> None:
    plan = digits_plan("killed", rounds=3, clients=1, epochs=15)
    coordinator.create(plan)
    state = enroll(coordinator, plan, "north", data, tmp_path, coordinator.url)
    for phase in ("training", "training-alone", "adapting"):
        agent = AgentProcess(state, "--adapt-epochs", "1000")
        try:
            with App(agent, data) as app:
                wait_for_phase(app, phase)
                before = answer(app, data)
        finally:
            agent.kill()
        offline = AgentProcess(state, "--no-train")
        try:
            with App(offline, data) as app:
                after = answer(app, data)
            assert offline.stop() == 0
        finally:
            offline.kill()
        if after != before:  # it decided between the answer and the kill
            assert after["model"]["candidate_digest"] == state.models.history()[-1].record
            assert after["model"]["candidate_digest"] != before["model"]["candidate_digest"]
    last = AgentProcess(state, "--no-serve", "--adapt-epochs", "3")
    assert last.wait() == 0, last.lines
    served = state.models.first_choice()
    assert served is not None
    record = state.models.record(served)
    assert record is not None
    assert record.report is not None
    assert record.report.alone_steps == record.report.alone_steps_due > 0  # what it owed was caught up
    assert state.models.history()[-1].considered.keys() == {"alone", "adapted"}


def make_old(state: StateFolder) -> None:
    """Leave in the folder what an agent of the last release would have left."""
    lines = [json.loads(line) for line in (state.path / "history.jsonl").read_text().splitlines()]
    kept = [{name: line[name] for name in OLD_FIELDS} for line in lines]
    (state.path / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    for file in [*(state.path / "models").glob("*/candidate-*"), *(state.path / "models").glob("*/*-*.safetensors")]:
        file.unlink()
    for name in ("prior.json", "adapted.safetensors"):
        (state.path / name).unlink(missing_ok=True)
    (state.path / "alone.safetensors").rename(state.path / "baseline.safetensors")
    condition = json.loads((state.path / "condition.json").read_text())
    condition.pop("holdout")
    (condition["serving"] or {}).pop("record", None)
    (state.path / "condition.json").write_text(json.dumps(condition))


def test_an_older_agents_folder_is_served_as_before_and_then_decided_about(
    coordinator: CoordinatorProcess, data: Path, tmp_path: Path
) -> None:
    plan = digits_plan("upgraded", rounds=2, clients=1)
    coordinator.create(plan)
    state = enroll(coordinator, plan, "north", data, tmp_path, coordinator.url)
    first = AgentProcess(state, "--no-serve")
    assert first.wait() == 0, first.lines
    make_old(state)
    (state.path / "pin").write_text("1")
    agent = AgentProcess(state, "--no-train")
    try:
        with App(agent, data) as app:
            assert app.served_round() == 1
            state.models.pin(None)
            app.wait_until_served(2)
            about = answer(app, data)["model"]
            assert (about["candidate"], about["candidate_digest"], about["temperature"]) == ("offset", None, 1.0)
        assert agent.stop() == 0
    finally:
        agent.kill()
    upgraded = AgentProcess(state)
    try:
        with App(upgraded, data) as app:
            upgraded.wait_for_line("The federation has finished")
            about = answer(app, data)["model"]
            assert about["candidate_digest"] == state.models.history()[-1].record != ""
            assert app.info()["verdict"] is not None
        assert upgraded.stop() == 0
    finally:
        upgraded.kill()
