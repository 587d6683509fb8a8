"""State that the shutdown acts on, and its words."""

import pytest

from client_agent.condition import Activity, Condition, Phase, Report, TroubleKind


@pytest.mark.parametrize("phase", Phase)
def test_only_training_is_waited_for_at_shutdown_whatever_its_words(phase: Phase) -> None:
    assert Activity(phase).stops_soon == (phase in (Phase.TRAINING, Phase.TRAINING_BASELINE))


def test_every_phase_has_words_of_its_own() -> None:
    texts = [str(Activity(phase, 7)) for phase in Phase]
    assert len(set(texts)) == len(texts)
    assert str(Activity(Phase.TRAINING, 7)) == "training round 7"


def test_a_trouble_is_logged_once_until_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    condition = Condition()
    for message in ("full", "full", "read-only"):
        condition.record(TroubleKind.STORAGE, message)
    assert [record.getMessage() for record in caplog.records] == ["storage: full", "storage: read-only"]


def test_a_condition_that_cannot_be_written_is_no_trouble(caplog: pytest.LogCaptureFixture) -> None:
    def full(_report: Report) -> None:
        raise OSError("No space left on device")

    Condition(full).record(TroubleKind.DATA, "gone")
    assert "No space left" in caplog.text
