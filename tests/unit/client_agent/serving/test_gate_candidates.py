"""Which candidate the gate serves, and that it stays the same one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.digit_sites import PLAN, digits_data, federation_model, make_context, new_state
from torch import Tensor

from client_agent.own_training import OwnTraining
from client_agent.serving.baseline import LocalBaseline
from client_agent.serving.calibration import apply_temperature
from client_agent.serving.candidates import Base
from client_agent.serving.gate import ModelGate
from client_agent.serving.model import load_served
from client_agent.serving.queue import PredictionQueue
from client_agent.settings import SITE_PRIOR
from client_agent.state import decisions
from client_agent.state.folder import StateFolder
from client_agent.state.kept_models import Bundle
from shared.learning.methods.base import TrainingContext
from shared.learning.runtime import Runtime
from shared.system import files
from shared.tensors.names import Tensors

DATA = digits_data(40, 40)
IMAGES = torch.cat([images for _, images, _ in DATA.test.in_order(40)])


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    return new_state(tmp_path / "north")


@pytest.fixture
def predictions() -> Iterator[PredictionQueue]:
    one = PredictionQueue(1, 1, 1)
    yield one
    one.stop()


@pytest.fixture(scope="module")
def alone() -> Tensors:
    """The site's own model after ten rounds."""
    baseline, weights = LocalBaseline(PLAN, "north"), Tensors()
    for number in range(10):
        weights = baseline.train(weights, number, TrainingContext(DATA.train))
    return weights


def make_gate(state: StateFolder, predictions: PredictionQueue | None, **options: Any) -> ModelGate:
    return make_context(state, predictions, **options).gate


def bring(state: StateFolder, bundle: Bundle) -> Bundle:
    state.models.save(bundle, keep=5)
    return bundle


def answers(gate: ModelGate) -> Tensor:
    assert gate.served is not None
    return gate.served.predict(IMAGES)


def after_restart(state: StateFolder) -> Tensor:
    again = StateFolder(state.path)
    return load_served(again, again.identity(), Runtime(), SITE_PRIOR)[1].predict(IMAGES)


def test_a_site_that_the_federation_hurts_serves_its_own_model(
    state: StateFolder, predictions: PredictionQueue, alone: Tensors
) -> None:
    state.own.save_alone(alone, 50)
    gate = make_gate(state, predictions)
    decision = gate.consider(bring(state, federation_model(1, spoil=True)), DATA)
    assert (decision.served, decision.candidate) == (True, "alone")
    own = LocalBaseline(PLAN, "north").predictor(alone, Runtime())(IMAGES).softmax(dim=1)
    assert gate.served is not None
    assert torch.equal(answers(gate), apply_temperature(own, gate.served.temperature))
    assert torch.equal(after_restart(state), answers(gate))


def test_without_alone_a_bad_model_does_not_replace_a_good_one(
    state: StateFolder, predictions: PredictionQueue, alone: Tensors
) -> None:
    state.own.save_alone(alone, 50)
    gate = make_gate(state, predictions, alone=False)
    assert gate.consider(bring(state, federation_model(1, epochs=8)), DATA).served
    before = answers(gate)
    decision = gate.consider(bring(state, federation_model(2, spoil=True)), DATA)
    assert not decision.approved
    assert "--max-accuracy-drop" in decision.reason
    assert torch.equal(answers(gate), before)


def test_the_same_bits_are_served_after_own_models_have_changed(
    state: StateFolder, predictions: PredictionQueue, alone: Tensors
) -> None:
    """The candidate keeps the weights it was chosen with."""
    state.own.save_alone(alone, 50)
    gate = make_gate(state, predictions)
    gate.consider(bring(state, federation_model(1, spoil=True)), DATA)
    before = answers(gate)
    state.own.save_alone({name: value * 0 for name, value in alone.items()}, 60)
    assert torch.equal(after_restart(state), before)
    gate.serve_kept()
    assert torch.equal(answers(gate), before)


def test_the_gate_decides_again_once_an_own_model_has_changed(
    state: StateFolder, predictions: PredictionQueue, alone: Tensors
) -> None:
    gate, bundle = make_gate(state, predictions), bring(state, federation_model(1, spoil=True))
    assert gate.consider(bundle, DATA).candidate != "alone"
    assert not gate.is_outdated(bundle)
    state.own.save_alone(alone, 50)
    assert gate.is_outdated(bundle)
    decision = gate.reconsider(bundle, DATA)
    assert decision is not None
    assert (decision.served, decision.candidate) == (True, "alone")
    assert not gate.is_outdated(bundle)
    assert len(state.models.history()) == 1
    assert torch.equal(after_restart(state), answers(gate))


def test_a_second_look_never_takes_an_approval_back(
    state: StateFolder, predictions: PredictionQueue, alone: Tensors, caplog: pytest.LogCaptureFixture
) -> None:
    state.own.save_alone(alone, 50)
    gate, bundle = make_gate(state, predictions), bring(state, federation_model(1, spoil=True))
    gate.consider(bundle, DATA)
    before, lines = answers(gate), state.models.history()
    state.own.save_alone({name: torch.zeros_like(value) for name, value in alone.items()}, 60)
    assert gate.reconsider(bundle, DATA) is None
    caplog.clear()
    assert gate.reconsider(bundle, None) is None  # type: ignore[arg-type]  # as if the images could not be read
    assert state.models.history() == lines
    assert torch.equal(answers(gate), before)
    assert torch.equal(after_restart(state), before)


def test_a_pinned_candidate_stays_when_the_gate_decides_again(
    state: StateFolder, predictions: PredictionQueue, alone: Tensors
) -> None:
    gate, bundle = make_gate(state, predictions), bring(state, federation_model(1, spoil=True))
    gate.consider(bundle, DATA)
    before = answers(gate)
    state.models.pin(1)
    gate.serve_kept()
    state.own.save_alone(alone, 50)
    decision = gate.reconsider(bundle, DATA)
    assert decision is not None
    assert (decision.held_by_pin, decision.candidate) == (True, "alone")
    assert torch.equal(answers(gate), before)
    assert torch.equal(after_restart(state), before)
    state.models.pin(None)
    gate.serve_kept()
    assert gate.served is not None
    assert gate.served.candidate.name == "alone"


@pytest.mark.parametrize("kind", ["alone", "adapted"])
def test_an_own_model_that_cannot_be_used_affects_nothing_else(
    state: StateFolder, predictions: PredictionQueue, kind: str
) -> None:
    bundle = bring(state, federation_model(1, epochs=8))
    other = {"other.weight": torch.zeros(3)}
    if kind == "alone":
        state.own.save_alone(other, 50)
    else:
        state.own.save_adapted(other, bundle.fingerprint, "whole", 10)
    decision = make_gate(state, predictions).consider(bundle, DATA)
    assert decision.served
    assert kind not in decision.candidate
    assert list(decision.considered) == [kind]


def test_a_model_of_an_older_agent_is_served_as_before(state: StateFolder, predictions: PredictionQueue) -> None:
    """Its history line knows nothing about candidates."""
    bundle = bring(state, federation_model(1, epochs=2))
    line = {"model": 1, "digest": bundle.digest, "fingerprint": bundle.fingerprint, "served": True}
    (state.path / "history.jsonl").write_text(json.dumps(line | {"with_offset": None, "without_offset": None}))
    gate = make_gate(state, predictions)
    gate.serve_kept()
    assert gate.served is not None
    assert (gate.served.candidate.name, gate.served.record, gate.served.temperature) == ("offset", "", 1.0)
    trained = gate.served.predictors[Base.OFFSET](IMAGES)
    assert torch.equal(after_restart(state), trained.softmax(dim=1))


def test_without_held_out_images_the_model_is_served_as_trained_with_the_prior(
    state: StateFolder, predictions: PredictionQueue
) -> None:
    gate = make_gate(state, predictions)
    decision = gate.consider(bring(state, federation_model(1, epochs=2)), digits_data(40, 0))
    assert (decision.served, decision.candidate, decision.score) == (True, "offset+prior", None)
    assert gate.served is not None
    assert gate.served.applied_prior() == "site"
    assert torch.equal(after_restart(state), answers(gate))


class Crash(BaseException):
    pass


def test_a_crash_at_any_write_leaves_the_old_or_the_new_answers(
    state: StateFolder, predictions: PredictionQueue, alone: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after kill -9: what a restarted agent answers is what it answered before, or what it had just decided for."""
    gate, bundle = make_gate(state, predictions), bring(state, federation_model(1, spoil=True))
    gate.consider(bundle, DATA)
    old, real = answers(gate), files.os.fsync
    state.own.save_alone(alone, 50)
    for allowed in range(50):
        calls = 0

        def fsync(descriptor: int, allowed: int = allowed) -> None:
            nonlocal calls
            calls += 1
            if calls > allowed:
                raise Crash
            real(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(files.os, "fsync", fsync)
            patch.setattr(decisions.os, "fsync", fsync)
            try:
                gate.reconsider(bundle, DATA)
                new = answers(gate)
                break
            except Crash:
                # The decision's line may be on disk although the crash came before it was known to be.
                name = StateFolder(state.path).models.history()[-1].candidate
                assert name == "alone" or torch.equal(after_restart(state), old)
                assert after_restart(state).shape == old.shape
    else:
        pytest.fail("never came to an end")
    assert not torch.equal(new, old)
    assert torch.equal(after_restart(state), new)


def test_an_adapted_model_is_a_candidate_of_its_own_model_only(
    state: StateFolder, predictions: PredictionQueue
) -> None:
    context = make_context(state, predictions, adapt_epochs=12)
    first = bring(state, federation_model(1, epochs=1))
    context.gate.consider(first, DATA)
    OwnTraining(context).use_pause(first, DATA, lambda: False, is_over=True)
    again = context.gate.reconsider(first, DATA)
    assert again is not None
    assert "adapted" in again.considered
    second = bring(state, federation_model(2, epochs=1))
    assert "adapted" not in context.gate.consider(second, DATA).considered
    assert after_restart(state).shape == (40, 4)
