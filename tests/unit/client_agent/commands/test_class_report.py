"""What `distrans-agent status` says about the served candidate."""

import json
import sys
from pathlib import Path

import pytest
from PIL import Image
from support.states import bundle, new_state
from typer.testing import CliRunner

from client_agent.__main__ import app
from client_agent.state.decisions import GateDecision
from client_agent.state.folder import StateFolder
from client_agent.state.records import CandidateRecord, ClassScores, MemberRecord, Score, SiteReport
from client_agent.status import AgentStatus, HoldoutSizes
from shared.contract.measurements import PairedCounts
from shared.learning.verdict import reach_verdict, wilson


def score(correct: int) -> Score:
    return Score(correct=correct, samples=100, accuracy=correct / 100, interval=wilson(correct, 100))


PAIRED = PairedCounts(samples=100, both=70, only_served=22, only_alone=4, neither=4)
REPORT = SiteReport(
    holdout=HoldoutSizes(validation=100, test=100, is_split=True),
    losses={"offset+prior": 0.2, "alone": 0.4},
    served=score(92),
    federation=score(60),
    alone=score(74),
    verdict=reach_verdict(PAIRED, "offset+prior"),
    alone_steps=40,
    alone_steps_due=40,
    calibration_error=0.031,
    classes=[
        ClassScores(label="cat", images=90, sensitivity=0.95, specificity=0.7, auc=0.981),
        ClassScores(label="dog", images=10, sensitivity=0.7, specificity=0.95, auc=None),
    ],
    confusion=[("cat", "cat", 85), ("cat", "dog", 5), ("dog", "cat", 3), ("dog", "dog", 7)],
)


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    return decided(tmp_path, REPORT)


def decided(path: Path, report: SiteReport | None) -> StateFolder:
    """Return a site that serves a candidate with this report."""
    state = new_state(path / "agent")
    state.models.save(bundle(4), keep=5)
    member = MemberRecord(base="offset", uses_prior=True, weight=1.0)
    record = state.models.save_record(
        bundle(4).key, CandidateRecord(name="offset+prior", members=(member,), report=report), {}
    )
    line = GateDecision(
        model=4, digest="digest-4", fingerprint=bundle(4).fingerprint, with_offset=None, without_offset=None,
        candidate="offset+prior", record=record,
    )  # fmt: skip
    state.models.add_decision(line)
    return state


def run(state: StateFolder, *options: str) -> str:
    result = CliRunner().invoke(app, ["status", "--state", str(state.path), *options], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("is_running", [False, True])
def test_the_verdict_is_shown_with_its_figures(state: StateFolder, is_running: bool) -> None:
    if is_running:
        with state.locked():
            AgentStatus(state.save_status).serve(bundle(4).key, state.models.history()[-1].record)
            printed = run(state)
        assert "Serving model 4 as offset+prior since" in printed
    else:
        printed = run(state)
        assert "it will serve model 4 as offset+prior." in printed
    assert "Joining pays off: +18.0 points (" in printed
    assert (
        "Accuracy on 100 test images: served 92.0% (85.0 to 95.9), alone 74.0% (64.6 to 81.6), global 60.0%" in printed
    )
    assert "Expected calibration error: 3.1%" in printed


def test_an_own_model_that_is_behind_is_pointed_out(tmp_path: Path) -> None:
    state = decided(tmp_path, REPORT.model_copy(update={"alone_steps": 10}))
    assert "(so far; this site's own model has taken 10 of 40 steps)." in run(state)


def test_everything_is_in_the_json(state: StateFolder) -> None:
    about = json.loads(run(state, "--json"))
    assert about["candidate"] == "offset+prior"
    assert about["verdict"]["outcome"] == "pays-off"
    assert about["verdict"]["p_value"] < 0.01
    assert about["scores"]["served"]["interval"]["low"] == pytest.approx(0.85, abs=0.01)
    assert about["scores"]["losses"] == {"offset+prior": 0.2, "alone": 0.4}
    assert about["calibration_error"] == 0.031
    assert about["classes"][0] == {
        "label": "cat", "images": 90, "sensitivity": 0.95, "specificity": 0.7, "auc": 0.981,
    }  # fmt: skip
    assert about["confusion"][1] == ["cat", "dog", 5]
    assert about["history"][0]["candidate"] == "offset+prior"


def test_classes_are_listed_on_request(state: StateFolder) -> None:
    assert "sensitivity" not in run(state)
    printed = run(state, "--classes")
    assert "cat" in printed
    assert "0.981" in printed
    mistakes = printed.split("Mistakes")[1]
    assert mistakes.index("cat") < mistakes.index("dog")


def test_an_unmeasured_model_has_no_scores(tmp_path: Path) -> None:
    state = decided(tmp_path, None)
    assert "There are no scores per class" in run(state, "--classes")
    about = json.loads(run(state, "--json"))
    assert (about["verdict"], about["scores"], about["classes"]) == (None, None, [])


def test_a_drawing_is_written(state: StateFolder, tmp_path: Path) -> None:
    target = tmp_path / "classes.png"
    assert f"Wrote {target}." in run(state, "--plot", str(target))
    json.loads(run(state, "--plot", str(target), "--json"))
    with Image.open(target) as picture:
        assert picture.width > picture.height > 400


def error(state: StateFolder, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    from client_agent import __main__ as command_line

    monkeypatch.setattr("sys.argv", ["distrans-agent", "status", "--state", str(state.path), "--plot", str(target)])
    with pytest.raises(SystemExit) as ending:
        command_line.main()
    assert ending.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_what_keeps_a_drawing_from_being_written_is_one_line(
    state: StateFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "cannot be written" in error(state, tmp_path / "classes.odd", monkeypatch, capsys)
    assert "cannot be written" in error(state, tmp_path / "nowhere" / "classes.png", monkeypatch, capsys)
    nothing = decided(tmp_path / "other", None)
    assert "There are no scores per class to draw." in error(nothing, tmp_path / "a.png", monkeypatch, capsys)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    line = error(state, tmp_path / "classes.png", monkeypatch, capsys)
    assert line == "error: Drawings need matplotlib. pip install 'distrans[figures]'"
