"""When a new model takes the served one's place."""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from client_agent.condition import Condition, TroubleKind
from client_agent.data import DataReport, SiteData
from client_agent.errors import StateError, UnusableModel
from client_agent.history import HistoryLine
from client_agent.kept_models import Bundle
from client_agent.model_gate import ModelGate
from client_agent.serving import PredictionQueue, load_served
from client_agent.settings import Identity, RunOptions
from client_agent.state import StateFolder
from shared.evaluation import Evaluation
from shared.http.connection import Connection
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


class Interrupting:
    """Held-out images that something else happens beside, in the middle of a measurement."""

    def __init__(self, event: Callable[[], None], samples: int) -> None:
        self._event, self.samples, self.unreadable = event, samples, ["image"] * (samples - 1)

    def batches(self, *_: object, **__: object) -> Iterator[tuple[Tensor, Tensor]]:
        self._event()
        yield torch.zeros(1, 1, 16, 16), torch.zeros(1, dtype=torch.int64)


def site_data(event: Callable[[], None], samples: int = 1) -> SiteData:
    """A site with `samples` held-out images, of which one can be read."""
    images: Any = Interrupting(event, samples)
    return SiteData(images, images, DataReport({"cat": 1, "dog": 1}, {"cat": 1, "dog": 0}))


def test_unpinned_while_a_model_is_measured_the_unmeasured_one_is_not_served(
    gate: ModelGate, state: StateFolder
) -> None:
    bring(gate, state, 0)
    bring(gate, state, 1)
    state.pin(0)
    gate.serve_kept()
    newer = bundle(2)
    newer.shared["logits.bias"][1] = 1e30  # answers wrongly
    state.save_bundle(newer, keep=9)
    seen = []

    def unpin() -> None:
        state.pin(None)
        gate.serve_kept()
        seen.append(served(gate))

    state.add_history(state.history()[-1].model_copy(update={"with_offset": score(90)}))
    line = gate.consider(newer, site_data(unpin))
    assert seen == [1, 1]
    assert not line.approved
    assert served(gate) == 1


@pytest.mark.parametrize("error", [KeyError("logits"), ValueError("odd"), RuntimeError("out of memory"), MemoryError()])
def test_whatever_fails_while_a_model_is_measured_only_that_model_is_rejected(
    gate: ModelGate, state: StateFolder, error: Exception
) -> None:
    def fail() -> None:
        raise error

    bring(gate, state, 0)
    one = bundle(1)
    state.save_bundle(one, keep=9)
    line = gate.consider(one, site_data(fail))
    assert not line.approved
    assert type(error).__name__ in line.reason
    assert served(gate) == 0
    assert state.history()[-1] == line


def test_a_reason_that_names_a_file_in_another_encoding_is_kept(gate: ModelGate, state: StateFolder) -> None:
    gate.reject(1, "d" * 10**6, UnusableModel(os.fsdecode(b"R\xf6ntgen.png cannot be read")))
    assert state.history()[-1].reason == r"R\udcf6ntgen.png cannot be read"
    assert state.history()[-1].digest == "d" * 64


def test_a_model_that_was_not_measured_does_not_replace_one_that_was(gate: ModelGate, state: StateFolder) -> None:
    bring(gate, state, 0)
    state.add_history(state.history()[-1].model_copy(update={"with_offset": score(90)}))
    line = bring(gate, state, 1)
    assert (line.approved, line.undecided) == (False, True)
    assert "not measured" in line.reason
    assert served(gate) == 0
    assert make_gate(state, None, margin=None).consider(bundle(1), None).served  # --max-accuracy-drop 1


def test_a_score_from_a_few_of_the_held_out_images_decides_nothing(gate: ModelGate, state: StateFolder) -> None:
    bring(gate, state, 0)
    state.add_history(state.history()[-1].model_copy(update={"with_offset": score(98)}))
    one = bundle(1)
    one.shared["logits.bias"][0] = 1e30  # answers rightly for the one image that can be read
    state.save_bundle(one, keep=9)
    line = gate.consider(one, site_data(lambda: None, samples=179))
    assert (line.approved, line.undecided, line.with_offset) == (False, True, None)
    assert "only 1 of the 179 held-out images can be read" in line.reason
    assert served(gate) == 0
    assert gate.consider(one, site_data(lambda: None, samples=2)).served  # one of a few may be missing


def test_a_failure_that_may_be_the_machines_is_measured_again(gate: ModelGate, state: StateFolder) -> None:
    def fail() -> None:
        raise RuntimeError("can't start new thread")

    bring(gate, state, 0)
    state.save_bundle(bundle(1), keep=9)
    assert gate.consider(bundle(1), site_data(fail)).undecided
    assert gate.consider(bundle(1), None).approved
    assert [line.model for line in state.history()] == [0, 1]


def test_models_cannot_get_worse_step_by_step(gate: ModelGate, state: StateFolder) -> None:
    for number, correct in enumerate((98, 88)):
        bring(gate, state, number)
        line = state.history()[-1]
        state.add_history(line.model_copy(update={"with_offset": score(correct), "served": True}))
    assert "where model 0 has 98.0%" in gate._objection(score(87))
    assert gate._objection(score(88)) == ""


@pytest.mark.parametrize(("old", "new"), [(68, 58), (90, 80), (37, 27)])
def test_a_drop_of_exactly_the_margin_is_allowed(state: StateFolder, old: int, new: int) -> None:
    state.add_history(HistoryLine(model=3, with_offset=score(old), without_offset=None))
    assert make_gate(state, None)._objection(score(new)) == ""


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
    condition = Condition()
    seen: list[tuple[int | None, list[TroubleKind]]] = []

    class Steps(threading.Event):
        """The watcher waits for it between two looks."""

        def wait(self, _timeout: float | None = None) -> bool:
            seen.append((served(gate), [trouble.kind for trouble in condition.report.troubles]))
            if len(seen) == 2:
                (state.path / "pin").rmdir()
                state.pin(0)
            return len(seen) == 3

    gate.follow_pin(Steps(), condition)
    assert seen == [(1, []), (1, [TroubleKind.PIN]), (0, [])]


def test_a_first_choice_that_could_not_be_read_is_tried_again(
    gate: ModelGate, state: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring(gate, state, 0)
    bring(gate, state, 1)
    file = state.kept_models()[0].folder / "model.safetensors"
    state.pin(0)
    hidden = file.rename(file.with_suffix(".hidden"))
    monkeypatch.setattr("client_agent.model_gate._SERVE_AGAIN_S", 0.0)
    gate.serve_kept()
    assert served(gate) == 1
    hidden.rename(file)
    looks = iter([False, True])
    stopping = threading.Event()
    monkeypatch.setattr(stopping, "wait", lambda _timeout: next(looks))
    gate.follow_pin(stopping, Condition())
    assert served(gate) == 0


def test_approved_models_that_are_damaged_are_not_called_rejected(gate: ModelGate, state: StateFolder) -> None:
    bring(gate, state, 0)
    (state.kept_models()[0].folder / "model.safetensors").unlink()
    with pytest.raises(StateError, match="None of the 1 approved models that are kept can be read"):
        load_served(state, state.identity(), Runtime())


def test_a_pin_to_another_model_of_the_same_number_is_reported(
    gate: ModelGate, state: StateFolder, caplog: pytest.LogCaptureFixture
) -> None:
    bring(gate, state, 0)
    (state.path / "pin").write_text("0 another")
    gate.serve_kept()
    assert "/predict is pinned to it, but it is not kept" in caplog.text


def test_a_model_that_was_not_measured_is_better_than_none(gate: ModelGate, state: StateFolder) -> None:
    state.add_history(HistoryLine(model=0, digest="gone", with_offset=score(90), without_offset=None))
    assert bring(gate, state, 1).served
    assert served(gate) == 1


def test_the_same_weights_under_a_new_number_are_a_new_model(gate: ModelGate, state: StateFolder) -> None:
    """As after `federation rollback`: the site's own tensors have changed since."""
    bring(gate, state, 0)
    bring(gate, state, 1)
    again = replace(bundle(2), digest="digest-0")
    state.save_bundle(again, keep=9)
    assert [kept.number for kept in state.choices()] == [1, 0]
    assert gate.consider(again, None).served
    assert [kept.number for kept in state.choices()] == [2, 1, 0]


def test_another_model_under_the_same_number_is_measured_before_it_is_served(
    gate: ModelGate, state: StateFolder
) -> None:
    """As after a coordinator was restored from a backup."""
    bring(gate, state, 1)
    state.save_bundle(replace(bundle(1), digest="other"), keep=9)
    assert [kept.digest for kept in state.choices()] == ["digest-1"]


def test_an_approved_model_with_other_tensors_of_this_site_is_measured_anew(
    gate: ModelGate, state: StateFolder
) -> None:
    """As when a coordinator sends the served model once more, with an offset that spoils it."""
    bring(gate, state, 0)
    bring(gate, state, 1)
    good = state.choices()[0]
    spoilt = replace(bundle(1), personal={"initial_offset": torch.full((1, 16, 16), 1e38)})
    state.save_bundle(spoilt, keep=1)
    assert state.choices() == [good]  # also after a crash before the decision

    def fail() -> None:
        raise ValueError("odd answers")

    assert not gate.consider(spoilt, site_data(fail)).approved
    assert gate.reject(1, "digest-1", UnusableModel("not what it should be")).reason
    assert state.choices() == [good]
    assert served(gate) == 1


def test_a_damaged_model_gives_way_to_the_one_approved_before(
    gate: ModelGate, state: StateFolder, predictions: PredictionQueue, caplog: pytest.LogCaptureFixture
) -> None:
    bring(gate, state, 0)
    bring(gate, state, 1)
    file = state.kept_models()[-1].folder / "model.safetensors"
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 1
    file.write_bytes(bytes(whole))
    predictions.model = None
    gate.serve_kept()
    assert served(gate) == 0
    assert "has changed since it was written" in caplog.text
