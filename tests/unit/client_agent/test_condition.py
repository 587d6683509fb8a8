"""State that the shutdown acts on, and its words."""

import os

import pytest

from client_agent.condition import Activity, Condition, Phase, Report, TroubleKind
from client_agent.errors import AgentEnded, Ending


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


@pytest.mark.parametrize("error", [OSError("No space left on device"), ValueError("odd text")])
def test_a_condition_that_cannot_be_written_is_no_trouble(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_report: Report) -> None:
        raise error

    Condition(fail).record(TroubleKind.DATA, "gone")
    assert str(error) in caplog.text


def test_file_names_that_are_not_utf_8_can_be_shown_and_stored() -> None:
    stored: list[str] = []
    condition = Condition(lambda report: stored.append(report.model_dump_json()))
    name = os.fsdecode(b"R\xf6ntgen.png")
    condition.record(TroubleKind.IMAGES, f"{name} cannot be read")
    condition.finish(f"over: {name}")
    condition.end(AgentEnded(Ending.LEFT, f"{name} has gone"))
    assert r"R\udcf6ntgen.png cannot be read" in Report.model_validate_json(stored[-1]).troubles[0].message
    assert condition.report.outcome == r"R\udcf6ntgen.png has gone"
