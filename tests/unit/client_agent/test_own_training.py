"""When a site's own models are trained, and that nothing else depends on it."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.digit_sites import digits_data, digits_plan, federation_model, make_context, new_state

from client_agent.errors import DataError, StopRequested
from client_agent.own_training import OwnTraining
from client_agent.state.folder import StateFolder

DATA = digits_data(24, 8)
STEPS = 3  # per round: 24 images in batches of 8
NEVER: Callable[[], bool] = lambda: False  # noqa: E731 - a constant


class Clock:
    """Advances by one second every time somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    return new_state(tmp_path / "north")


def steps(state: StateFolder) -> int:
    stored = state.own.alone()
    return 0 if stored is None else stored.count("steps")


def epochs(state: StateFolder, fingerprint: str) -> int:
    stored = state.own.adapted(fingerprint, "whole")
    return 0 if stored is None else stored.count("epochs")


def test_alone_takes_a_rounds_steps_after_each_upload(state: StateFolder) -> None:
    training, bundle = OwnTraining(make_context(state), clock=lambda: 0.0), federation_model(0)
    for number in (1, 2):
        training.follow_round(number, bundle, DATA, seconds=30.0)
        assert steps(state) == number * STEPS


def test_what_does_not_fit_into_a_third_of_the_time_is_owed_and_caught_up(state: StateFolder) -> None:
    """The clock ticks once per batch and once for the deadline."""
    training, bundle = OwnTraining(make_context(state, adapt="off"), clock=Clock()), federation_model(0)
    training.follow_round(1, bundle, DATA, seconds=12.0)
    assert 0 < steps(state) < STEPS
    assert training.has_work(bundle, DATA, is_over=False)
    training.use_pause(bundle, DATA, NEVER, is_over=False)
    assert steps(state) == STEPS


def test_news_ends_the_pause_within_a_batch_and_nothing_is_lost(state: StateFolder) -> None:
    training, bundle = OwnTraining(make_context(state, adapt="off")), federation_model(40)
    looks: list[None] = []

    def has_news() -> bool:
        looks.append(None)
        return len(looks) > 2 * STEPS

    training.use_pause(bundle, DATA, has_news, is_over=False)
    assert 0 < steps(state) <= 2 * STEPS
    assert training.has_work(bundle, DATA, is_over=False)


def test_a_restart_continues_where_the_last_run_was(state: StateFolder) -> None:
    bundle = federation_model(2)
    for training in (OwnTraining(make_context(state, adapt="off")) for _ in range(2)):
        training.use_pause(bundle, DATA, NEVER, is_over=False)
        assert steps(state) == 2 * STEPS
    later = federation_model(3)
    OwnTraining(make_context(state, adapt="off")).use_pause(later, DATA, NEVER, is_over=False)
    assert steps(state) == 3 * STEPS


def test_the_site_learns_something_alone(state: StateFolder) -> None:
    OwnTraining(make_context(state, adapt="off")).use_pause(federation_model(30), DATA, NEVER, is_over=False)
    decision = make_context(state).gate.consider(federation_model(30), DATA)
    assert decision.local is not None
    assert (decision.local.accuracy or 0) > 0.9


def test_a_stop_is_obeyed_and_keeps_the_steps_taken(state: StateFolder) -> None:
    context, taken = make_context(state, adapt="off"), []

    class Stopping(threading.Event):
        def is_set(self) -> bool:
            taken.append(None)
            return len(taken) > 2

    training = OwnTraining(replace(context, stopping=Stopping()))
    with pytest.raises(StopRequested):
        training.use_pause(federation_model(40), DATA, NEVER, is_over=False)
    assert 0 < steps(state) < 40 * STEPS


def test_a_damaged_own_model_is_trained_from_the_start(state: StateFolder) -> None:
    training = OwnTraining(make_context(state, adapt="off"))
    training.use_pause(federation_model(2), DATA, NEVER, is_over=False)
    file = state.path / "alone.safetensors"
    expected = file.read_bytes()
    file.write_bytes(b"damaged")
    again = OwnTraining(make_context(state, adapt="off"))
    again.use_pause(federation_model(2), DATA, NEVER, is_over=False)
    assert file.read_bytes() == expected


def test_an_error_is_logged_and_tried_again_a_round_later(state: StateFolder, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise DataError("The disk is gone.")

    broken = digits_data(24, 8)
    broken.train.batches = fail  # type: ignore[method-assign, assignment]
    training = OwnTraining(make_context(state, adapt="off"))
    training.use_pause(federation_model(1), broken, NEVER, is_over=False)
    assert "could not train this site's own model: The disk is gone." in caplog.text
    assert not training.has_work(federation_model(1), DATA, is_over=False)
    assert training.has_work(federation_model(2), DATA, is_over=False)


def test_nothing_is_trained_if_it_is_turned_off(state: StateFolder) -> None:
    training = OwnTraining(make_context(state, alone=False, adapt="off"))
    assert not training.has_work(federation_model(3), DATA, is_over=True)
    training.follow_round(3, federation_model(2), DATA, seconds=100.0)
    assert state.own.alone() is None


class TestAdaptation:
    def test_waits_until_it_knows_how_long_a_round_takes(self, state: StateFolder) -> None:
        training, bundle = OwnTraining(make_context(state, alone=False), clock=lambda: 0.0), federation_model(1)
        assert not training.has_work(bundle, DATA, is_over=False)
        training.follow_round(1, bundle, DATA, seconds=3.0)
        assert training.has_work(bundle, DATA, is_over=False)
        training.use_pause(bundle, DATA, NEVER, is_over=False)
        assert epochs(state, bundle.fingerprint) == 10
        training.note_decision(bundle)
        assert not training.has_work(bundle, DATA, is_over=False)  # once per model
        assert training.has_work(federation_model(2), DATA, is_over=False)

    def test_drops_epochs_that_do_not_fit_and_takes_them_when_the_federation_is_over(self, state: StateFolder) -> None:
        training, bundle = OwnTraining(make_context(state, alone=False), clock=Clock()), federation_model(1)
        training.follow_round(1, bundle, DATA, seconds=30.0)
        training.use_pause(bundle, DATA, NEVER, is_over=False)
        assert 0 < epochs(state, bundle.fingerprint) < 10
        training.note_decision(bundle)
        assert not training.has_work(bundle, DATA, is_over=False)
        assert training.has_work(bundle, DATA, is_over=True)
        training.use_pause(bundle, DATA, NEVER, is_over=True)
        assert epochs(state, bundle.fingerprint) == 10

    def test_gives_up_on_a_model_if_not_even_one_epoch_fits(self, state: StateFolder) -> None:
        training, bundle = OwnTraining(make_context(state, alone=False), clock=Clock()), federation_model(1)
        training.follow_round(1, bundle, DATA, seconds=3.0)
        training.use_pause(bundle, DATA, NEVER, is_over=False)
        assert state.own.adapted(bundle.fingerprint, "whole") is None
        assert not training.has_work(bundle, DATA, is_over=False)

    def test_starts_again_after_news_that_brought_no_new_model(self, state: StateFolder) -> None:
        training, bundle = OwnTraining(make_context(state, alone=False)), federation_model(1)
        looks: list[None] = []
        training.use_pause(bundle, DATA, lambda: bool(looks.append(None)) or len(looks) > 4, is_over=True)
        assert state.own.adapted(bundle.fingerprint, "whole") is None
        training.use_pause(bundle, DATA, NEVER, is_over=True)
        assert epochs(state, bundle.fingerprint) == 10

    def test_a_restart_does_not_repeat_it(self, state: StateFolder) -> None:
        bundle = federation_model(1)
        OwnTraining(make_context(state, alone=False)).use_pause(bundle, DATA, NEVER, is_over=True)
        again = OwnTraining(make_context(state, alone=False))
        assert not again.has_work(bundle, DATA, is_over=True)

    def test_an_error_affects_nothing_else(self, state: StateFolder, caplog: pytest.LogCaptureFixture) -> None:
        broken = federation_model(1)
        del broken.shared["logits.bias"]
        training = OwnTraining(make_context(state))
        training.use_pause(broken, DATA, NEVER, is_over=True)
        assert "could not fine-tune model 1" in caplog.text
        assert steps(state) == STEPS

    def test_methods_that_cannot_be_adapted_are_left_alone(self, tmp_path: Path) -> None:
        plan = digits_plan({"name": "pfedme"})
        state = new_state(tmp_path / "other", plan)
        training = OwnTraining(make_context(state, alone=False))
        assert not training.has_work(federation_model(1, plan=plan), DATA, is_over=True)
