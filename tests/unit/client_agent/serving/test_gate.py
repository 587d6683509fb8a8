"""When a new model replaces the served one."""

import os

import pytest
from support.gates import bring, bundle, make_gate, score, served, site_data

from client_agent.errors import UnusableModel
from client_agent.serving.gate import ModelGate
from client_agent.state.decisions import GateDecision
from client_agent.state.folder import StateFolder


@pytest.mark.parametrize(
    ("margin", "correct", "approved"),
    [(0.1, 95, True), (0.1, 80, True), (0.1, 79, False), (0.0, 90, True), (0.0, 89, False), (None, 0, True)],
)
def test_a_model_that_scores_worse_by_more_than_the_margin_is_held_back(
    state: StateFolder, margin: float | None, correct: int, approved: bool
) -> None:
    state.models.add_decision(GateDecision(model=3, with_offset=score(90), without_offset=None))
    state.models.add_decision(
        GateDecision(model=4, with_offset=score(20), without_offset=None, served=False, reason="worse")
    )
    reason = make_gate(state, None, margin)._reason_to_reject(score(correct))
    assert (reason == "") is approved
    if not approved:
        assert f"it scores {correct / 100:.1%}, model 3 scores 90.0%" in reason


def test_new_models_are_served_as_they_arrive(gate: ModelGate, state: StateFolder) -> None:
    for number in range(3):
        assert bring(gate, state, number).served
        assert served(gate) == number


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


@pytest.mark.parametrize("error", [KeyError("logits"), ValueError("odd"), RuntimeError("out of memory"), MemoryError()])
def test_an_error_while_measuring_rejects_only_that_model(
    gate: ModelGate, state: StateFolder, error: Exception
) -> None:
    def fail() -> None:
        raise error

    bring(gate, state, 0)
    one = bundle(1)
    state.models.save(one, keep=9)
    line = gate.consider(one, site_data(fail))
    assert not line.approved
    assert type(error).__name__ in line.reason
    assert served(gate) == 0
    assert state.models.history()[-1] == line


def test_a_reason_with_a_file_name_in_another_encoding_is_stored(gate: ModelGate, state: StateFolder) -> None:
    gate.reject(1, "d" * 10**6, UnusableModel(os.fsdecode(b"R\xf6ntgen.png cannot be read")))
    assert state.models.history()[-1].reason == r"R\udcf6ntgen.png cannot be read"
    assert state.models.history()[-1].digest == "d" * 64


def test_an_unmeasured_model_does_not_replace_a_measured_one(gate: ModelGate, state: StateFolder) -> None:
    bring(gate, state, 0)
    state.models.add_decision(state.models.history()[-1].model_copy(update={"with_offset": score(90)}))
    line = bring(gate, state, 1)
    assert (line.approved, line.undecided) == (False, True)
    assert "not measured" in line.reason
    assert served(gate) == 0
    assert make_gate(state, None, margin=None).consider(bundle(1), None).served  # --max-accuracy-drop 1


def test_a_score_from_a_few_of_the_held_out_images_decides_nothing(gate: ModelGate, state: StateFolder) -> None:
    bring(gate, state, 0)
    state.models.add_decision(state.models.history()[-1].model_copy(update={"with_offset": score(98)}))
    one = bundle(1)
    one.shared["logits.bias"][0] = 1e30  # answers correctly for the one readable image
    state.models.save(one, keep=9)
    line = gate.consider(one, site_data(lambda: None, samples=179))
    assert (line.approved, line.undecided, line.with_offset) == (False, True, None)
    assert "only 1 of the 179 held-out images can be read" in line.reason
    assert served(gate) == 0
    assert gate.consider(one, site_data(lambda: None, samples=2)).served  # one of a few may be missing


def test_a_model_is_measured_again_if_the_machine_may_have_failed(gate: ModelGate, state: StateFolder) -> None:
    def fail() -> None:
        raise RuntimeError("can't start new thread")

    bring(gate, state, 0)
    state.models.save(bundle(1), keep=9)
    assert gate.consider(bundle(1), site_data(fail)).undecided
    assert gate.consider(bundle(1), None).approved
    assert [line.model for line in state.models.history()] == [0, 1]


def test_models_cannot_get_worse_step_by_step(gate: ModelGate, state: StateFolder) -> None:
    for number, correct in enumerate((98, 88)):
        bring(gate, state, number)
        line = state.models.history()[-1]
        state.models.add_decision(line.model_copy(update={"with_offset": score(correct), "served": True}))
    assert "model 0 scores 98.0%" in gate._reason_to_reject(score(87))
    assert gate._reason_to_reject(score(88)) == ""


@pytest.mark.parametrize(("old", "new"), [(68, 58), (90, 80), (37, 27)])
def test_a_drop_of_exactly_the_margin_is_allowed(state: StateFolder, old: int, new: int) -> None:
    state.models.add_decision(GateDecision(model=3, with_offset=score(old), without_offset=None))
    assert make_gate(state, None)._reason_to_reject(score(new)) == ""


def test_an_unmeasured_model_is_served_if_there_is_no_other(gate: ModelGate, state: StateFolder) -> None:
    state.models.add_decision(GateDecision(model=0, digest="gone", with_offset=score(90), without_offset=None))
    assert bring(gate, state, 1).served
    assert served(gate) == 1
