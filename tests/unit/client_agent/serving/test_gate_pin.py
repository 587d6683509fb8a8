"""How a pin overrides the gate."""

import threading

import pytest
from support.gates import bring, bundle, score, served, site_data

from client_agent.serving.gate import ModelGate
from client_agent.serving.queue import PredictionQueue
from client_agent.state.folder import StateFolder
from client_agent.status import AgentStatus, TroubleKind


def test_a_pin_holds_new_models_back_and_afterwards_the_newest_is_served(gate: ModelGate, state: StateFolder) -> None:
    bring(gate, state, 0)
    bring(gate, state, 1)
    state.models.pin(0)
    gate.serve_kept()
    assert served(gate) == 0
    line = bring(gate, state, 2)
    assert (line.served, line.reason) == (False, "/predict is pinned to model 0")
    assert served(gate) == 0
    state.models.pin(None)
    gate.serve_kept()
    assert served(gate) == 2


def test_a_pinned_model_that_is_gone_is_reported(
    gate: ModelGate, state: StateFolder, caplog: pytest.LogCaptureFixture
) -> None:
    bring(gate, state, 0)
    (state.path / "pin").write_text("7")
    gate.serve_kept()
    assert "/predict is pinned to model 7, which is no longer kept" in caplog.text
    assert served(gate) == 0


def test_unpinning_during_a_measurement_does_not_serve_the_unmeasured_model(
    gate: ModelGate, state: StateFolder
) -> None:
    bring(gate, state, 0)
    bring(gate, state, 1)
    state.models.pin(0)
    gate.serve_kept()
    newer = bundle(2)
    newer.shared["logits.bias"][1] = 1e30  # gives wrong answers
    state.models.save(newer, keep=9)
    seen = []

    def unpin() -> None:
        state.models.pin(None)
        gate.serve_kept()
        seen.append(served(gate))

    state.models.add_decision(state.models.history()[-1].model_copy(update={"with_offset": score(90)}))
    line = gate.consider(newer, site_data(unpin))
    assert seen == [1]
    assert not line.approved
    assert served(gate) == 1


def test_a_pin_that_cannot_be_read_changes_nothing_while_running(
    gate: ModelGate, state: StateFolder, predictions: PredictionQueue
) -> None:
    bring(gate, state, 0)
    bring(gate, state, 1)
    (state.path / "pin").mkdir()
    line = bring(gate, state, 2)
    assert (line.approved, line.served) == (True, False)
    assert "the pin cannot be read" in line.reason
    assert served(gate) == 1
    predictions.model = None
    gate.serve_kept()  # as after a restart
    assert served(gate) == 2


def test_a_pin_is_followed_once_it_can_be_read(gate: ModelGate, state: StateFolder) -> None:
    bring(gate, state, 0)
    bring(gate, state, 1)
    (state.path / "pin").mkdir()
    gate.serve_kept()
    status = AgentStatus()
    seen: list[tuple[int | None, list[TroubleKind]]] = []

    class Steps(threading.Event):
        """The watcher waits for it between two polls."""

        def wait(self, _timeout: float | None = None) -> bool:
            seen.append((served(gate), [trouble.kind for trouble in status.report.troubles]))
            if len(seen) == 2:
                (state.path / "pin").rmdir()
                state.models.pin(0)
            return len(seen) == 3

    gate.follow_pin(Steps(), status)
    assert seen == [(1, []), (1, [TroubleKind.PIN]), (0, [])]


def test_a_pin_to_another_model_of_the_same_number_is_reported(
    gate: ModelGate, state: StateFolder, caplog: pytest.LogCaptureFixture
) -> None:
    bring(gate, state, 0)
    (state.path / "pin").write_text("0 another")
    gate.serve_kept()
    assert "/predict is pinned to model 0, which is no longer kept" in caplog.text
