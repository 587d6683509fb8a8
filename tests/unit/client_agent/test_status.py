"""The agent's live status."""

import os

import pytest

from client_agent.errors import AgentEnded, Ending
from client_agent.status import Activity, AgentStatus, Phase, StatusSnapshot, TroubleKind


@pytest.mark.parametrize("phase", Phase)
def test_shutdown_waits_only_for_training(phase: Phase) -> None:
    assert Activity(phase).is_interruptible == (phase in (Phase.TRAINING, Phase.TRAINING_ALONE, Phase.ADAPTING))


def test_every_phase_has_a_distinct_description() -> None:
    texts = [str(Activity(phase, 7)) for phase in Phase]
    assert len(set(texts)) == len(texts)
    assert str(Activity(Phase.TRAINING, 7)) == "training round 7"


def test_a_trouble_is_logged_once_until_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    status = AgentStatus()
    for message in ("full", "full", "read-only"):
        status.record(TroubleKind.STORAGE, message)
    assert [record.getMessage() for record in caplog.records] == ["storage: full", "storage: read-only"]


@pytest.mark.parametrize("error", [OSError("No space left on device"), ValueError("odd text")])
def test_a_status_that_cannot_be_saved_is_not_a_trouble(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_report: StatusSnapshot) -> None:
        raise error

    AgentStatus(fail).record(TroubleKind.DATA, "gone")
    assert str(error) in caplog.text


def test_file_names_that_are_not_utf_8_can_be_shown_and_stored() -> None:
    stored: list[str] = []
    status = AgentStatus(lambda report: stored.append(report.model_dump_json()))
    name = os.fsdecode(b"R\xf6ntgen.png")
    status.record(TroubleKind.IMAGES, f"{name} cannot be read")
    status.finish(f"over: {name}")
    status.end(AgentEnded(Ending.LEFT, f"{name} has gone"))
    assert r"R\udcf6ntgen.png cannot be read" in StatusSnapshot.model_validate_json(stored[-1]).troubles[0].message
    assert status.report.outcome == r"R\udcf6ntgen.png has gone"
