"""Which kept model is served after a restart, and which is not trusted."""

import threading
from dataclasses import replace

import pytest
import torch
from support.gates import bring, bundle, make_gate, score, served, site_data

from client_agent.errors import StateError, UnusableModel
from client_agent.serving.gate import ModelGate
from client_agent.serving.model import load_served
from client_agent.serving.queue import PredictionQueue
from client_agent.settings import SITE_PRIOR
from client_agent.state.decisions import GateDecision
from client_agent.state.folder import StateFolder
from client_agent.status import AgentStatus
from shared.learning.runtime import Runtime


def test_a_restart_serves_what_was_served_before(
    gate: ModelGate, state: StateFolder, predictions: PredictionQueue
) -> None:
    for number in range(3):
        bring(gate, state, number)
    state.models.add_decision(
        GateDecision(model=2, with_offset=score(1), without_offset=None, served=False, reason="worse")
    )
    predictions.model = None
    make_gate(state, predictions).serve_kept()
    assert served(gate) == 1


def test_without_any_model_nothing_is_served(gate: ModelGate) -> None:
    gate.serve_kept()
    assert gate.served is None


def test_a_first_choice_that_could_not_be_read_is_tried_again(
    gate: ModelGate, state: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring(gate, state, 0)
    bring(gate, state, 1)
    file = state.models.all()[0].folder / "model.safetensors"
    state.models.pin(0)
    hidden = file.rename(file.with_suffix(".hidden"))
    monkeypatch.setattr("client_agent.serving.gate._SERVE_RETRY_S", 0.0)
    gate.serve_kept()
    assert served(gate) == 1
    hidden.rename(file)
    looks = iter([False, True])
    stopping = threading.Event()
    monkeypatch.setattr(stopping, "wait", lambda _timeout: next(looks))
    gate.follow_pin(stopping, AgentStatus())
    assert served(gate) == 0


def test_damaged_approved_models_are_not_reported_as_rejected(gate: ModelGate, state: StateFolder) -> None:
    bring(gate, state, 0)
    (state.models.all()[0].folder / "model.safetensors").unlink()
    with pytest.raises(StateError, match="None of the 1 approved models kept here can be read"):
        load_served(state, state.identity(), Runtime(), SITE_PRIOR)


def test_the_same_weights_under_a_new_number_are_a_new_model(gate: ModelGate, state: StateFolder) -> None:
    """As after `federation rollback`: the site's own tensors have changed since then."""
    bring(gate, state, 0)
    bring(gate, state, 1)
    again = replace(bundle(2), digest="digest-0")
    state.models.save(again, keep=9)
    assert [kept.key.number for kept in state.models.servable()] == [1, 0]
    assert gate.consider(again, None).served
    assert [kept.key.number for kept in state.models.servable()] == [2, 1, 0]


def test_another_model_under_the_same_number_is_measured_before_it_is_served(
    gate: ModelGate, state: StateFolder
) -> None:
    """As after restoring a coordinator from a backup."""
    bring(gate, state, 1)
    state.models.save(replace(bundle(1), digest="other"), keep=9)
    assert [kept.key.digest for kept in state.models.servable()] == ["digest-1"]


def test_an_approved_model_with_other_site_tensors_is_measured_again(gate: ModelGate, state: StateFolder) -> None:
    """As when a coordinator sends the served model again with an offset that ruins it."""
    bring(gate, state, 0)
    bring(gate, state, 1)
    good = state.models.servable()[0]
    spoilt = replace(bundle(1), personal={"initial_offset": torch.full((1, 16, 16), 1e38)})
    state.models.save(spoilt, keep=1)
    assert state.models.servable() == [good]  # as after a crash before the decision

    def fail() -> None:
        raise ValueError("odd answers")

    assert not gate.consider(spoilt, site_data(fail)).approved
    assert gate.reject(1, "digest-1", UnusableModel("not what it should be")).reason
    assert state.models.servable() == [good]
    assert served(gate) == 1


def test_a_damaged_model_gives_way_to_the_one_approved_before(
    gate: ModelGate, state: StateFolder, predictions: PredictionQueue, caplog: pytest.LogCaptureFixture
) -> None:
    bring(gate, state, 0)
    bring(gate, state, 1)
    file = state.models.all()[-1].folder / "model.safetensors"
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 1
    file.write_bytes(bytes(whole))
    predictions.model = None
    gate.serve_kept()
    assert served(gate) == 0
    assert "has changed since it was written" in caplog.text
