"""What the page says, in particular when there is nothing to show."""

from typing import Any

import pytest
from support.agent_service import PLAN
from support.page_service import NOTHING_YET

from client_agent.status import Phase, TroubleKind
from client_agent.web.pages.view import Page, describe
from shared.contract.measurements import PairedCounts
from shared.learning.verdict import reach_verdict

SERVING = {"round": 3, "candidate": "offset", "offset_digest": "o", "members": [], "mixed": "probabilities"}
SERVING |= {"prior": "site", "temperature": 1.0}
SCORE = {"correct": 9, "samples": 10, "accuracy": 0.9, "interval": {"low": 0.6, "high": 0.98}}
SCORES = {"served": SCORE, "federation": SCORE, "alone": None}
SPLIT = {"validation": 30, "test": 31, "is_split": True}


def page(agent: dict[str, Any] | None = None, **info: Any) -> Page:
    return describe(NOTHING_YET | info | {"agent": NOTHING_YET["agent"] | (agent or {})}, PLAN, may_pin=True)


def row(model: int, *, served: bool = True, reason: str = "") -> dict[str, Any]:
    return {"model": model, "candidate": "offset", "test": 0.5, "served": served, "reason": reason}


def test_an_agent_that_waits_for_its_first_model_says_who_acts_next() -> None:
    found = page()
    assert found.no_model.command == "distrans-server federation start pets"
    assert found.no_verdict is not None
    assert found.no_verdict.title == "Nothing measured yet"
    assert found.alerts == []


@pytest.mark.parametrize(
    ("info", "title"),
    [
        ({"held_out": {"validation": 0, "test": 0, "is_split": False}, "serving": SERVING}, "No held-out images"),
        ({"serving": SERVING, "held_out": None}, "Not measured"),
        ({"serving": SERVING, "held_out": SPLIT, "scores": SCORES}, "No verdict yet"),
    ],
)
def test_a_missing_verdict_has_its_reason(info: dict[str, Any], title: str) -> None:
    found = page(**info).no_verdict
    assert found is not None
    assert found.title == title


def test_a_verdict_is_shown_with_its_word() -> None:
    verdict = reach_verdict(PairedCounts(samples=100, both=60, only_served=30, only_alone=2, neither=8), "offset")
    found = page(verdict=verdict.model_dump(), verdict_so_far=verdict.sentence, scores=SCORES, serving=SERVING)
    assert (found.verdict_word, found.verdict_kind, found.no_verdict) == ("joining pays off", "good", None)
    assert found.scores == [
        ("Served", "90 %", "95 %: 60 % to 98 %"),
        ("Global model", "90 %", "95 %: 60 % to 98 %"),
    ]


@pytest.mark.parametrize("ended", ["left", "revoked", "cancelled", "invalid-token"])
def test_an_ending_is_said_first_and_that_predictions_continue(ended: str) -> None:
    (alert,) = page({"ended": ended, "outcome": "Why."}, serving=SERVING).alerts
    assert alert.text == "Why."
    assert alert.next_step == "Predictions continue."


def test_a_finished_federation_is_no_trouble() -> None:
    found = page({"outcome": "The federation has finished: all 3 rounds are done"}, serving=SERVING)
    assert [alert.kind for alert in found.alerts] == ["info"]
    assert "distrans-agent export" in found.alerts[0].text
    assert found.round == "over"


@pytest.mark.parametrize("kind", TroubleKind)
def test_every_trouble_has_a_title_and_a_next_step(kind: TroubleKind) -> None:
    (alert,) = page({"troubles": [{"kind": kind, "message": "What happened."}]}).alerts
    assert alert.text == "What happened."
    assert alert.next_step


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_can_be_shown(phase: Phase) -> None:
    assert page({"phase": phase, "round": 2}).activity_kind in ("good", "warn", "info", "neutral")


def test_the_round_is_the_one_in_training_or_else_the_newest_model() -> None:
    total = PLAN.rounds.count
    assert page({"phase": "training", "round": 7}, history=[row(6)]).round == f"7 of {total}"
    assert page({"phase": "downloading", "round": 7}, history=[row(5), row(6)]).round == f"6 of {total}"


def test_a_pin_that_cannot_be_followed_is_said() -> None:
    assert page(pinned=3, serving=SERVING).alerts == []
    (alert,) = page(pinned=2, serving=SERVING).alerts
    assert alert.title == "Model 2 is pinned but not served"


def test_models_are_listed_once_with_what_can_be_done() -> None:
    history = [row(1, served=False, reason="it scores 10 %"), row(2), row(3), row(3)]
    found = page(history=history, kept_models=[2, 3], pinned=2, serving=SERVING).models
    assert [(one.number, one.is_kept, one.is_served, one.is_pinned, one.outcome) for one in found] == [
        (3, True, True, False, ""),
        (2, True, False, True, ""),
        (1, False, False, False, "it scores 10 %"),
    ]


def test_a_long_history_is_shortened_but_kept_models_stay() -> None:
    found = page(history=[row(number) for number in range(1000)], kept_models=[4, 999]).models
    assert len(found) < 40
    assert {found[0].number, found[-1].number} == {999, 4}


@pytest.mark.parametrize(
    ("classes", "word"),
    [
        ({"training": None, "predicted": {}, "distance": None, "drifts": False}, "unknown"),
        ({"training": {"cat": 5}, "predicted": {"cat": 2}, "distance": None, "drifts": False}, "too few"),
        ({"training": {"cat": 5}, "predicted": {"cat": 40}, "distance": 0.05, "drifts": False}, "as trained"),
        ({"training": {"cat": 5}, "predicted": {"dog": 40}, "distance": 1.0, "drifts": True}, "drifts"),
    ],
)
def test_drift_has_a_word(classes: dict[str, Any], word: str) -> None:
    assert page(classes_here=classes).drift_word == word
