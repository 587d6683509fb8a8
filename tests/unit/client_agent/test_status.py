"""`distrans-agent status`: what runs, what it serves and since when."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from client_agent.__main__ import app
from client_agent.condition import Condition, TroubleKind
from client_agent.history import HistoryLine
from client_agent.kept_models import Bundle
from client_agent.settings import Identity
from client_agent.state import StateFolder
from shared.evaluation import Evaluation
from shared.http.connection import Connection
from shared.plan import validate_plan

PLAN = validate_plan(
    {
        "name": "pets",
        "classes": ["cat", "dog"],
        "image": {"channels": 1, "height": 14, "width": 14},
        "method": {"name": "fedavg"},
    }
)
LONG = "it scores 10.0% where model 1 has 90.0%; --max-accuracy-drop allows 10.0%, and this goes on past column 80"


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    folder = StateFolder(tmp_path / "agent")
    connection = Connection(server="https://coordinator.example")
    folder.create(
        Identity(
            client_id="c", name="north", token="t", federation="pets", plan=PLAN, connection=connection, data="images"
        )
    )
    return folder


def keep(state: StateFolder, number: int, *, served: bool = True, reason: str = "") -> Bundle:
    bundle = Bundle(number, f"{number:064x}", {}, {}, {}, {})
    state.save_bundle(bundle, keep=5)
    score = Evaluation(samples=12, correct=9, loss_sum=1.0)
    state.add_history(
        HistoryLine(
            model=number,
            digest=bundle.digest,
            fingerprint=bundle.fingerprint,
            with_offset=score,
            without_offset=None,
            served=served,
            reason=reason,
        )
    )
    return bundle


def status(state: StateFolder) -> dict[str, object]:
    found: dict[str, object] = json.loads(
        CliRunner().invoke(app, ["status", "--state", str(state.path), "--json"]).stdout
    )
    return found


def text(state: StateFolder) -> str:
    return CliRunner().invoke(app, ["status", "--state", str(state.path)]).stdout


def test_a_running_agent_and_the_model_it_serves_since_when(state: StateFolder) -> None:
    served = keep(state, 4)
    keep(state, 5)  # approved, but the agent could not build it and answers with model 4
    with state.locked():
        condition = Condition(state.save_condition)
        condition.serve(served.number, served.digest, served.fingerprint)
        condition.note_data(held_out_images=120)
        about = status(state)
        assert (about["running"], about["serving"], about["held_out_images"]) == (True, 4, 120)
        assert about["serving_since"] == pytest.approx((state.path / "condition.json").stat().st_mtime, abs=60)
        assert "The agent is running.\nServing model 4 since 20" in text(state)
        assert "Held-out images: 120\n" in text(state)


def test_an_agent_that_was_killed_is_not_running(state: StateFolder) -> None:
    keep(state, 4)
    lock = str(state.path / "lock")
    holding = (
        f"import fcntl, time; lock = open({lock!r}, 'w'); fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", holding], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert status(state)["running"] is True
        process.kill()
        process.wait()
    about = status(state)
    assert (about["running"], about["serving"], about["serving_since"]) == (False, 4, None)
    assert f"The agent is not running. Start it: distrans-agent run --state {state.path}" in text(state)
    assert "When it runs, it serves model 4." in text(state)


def test_looking_does_not_keep_an_agent_from_starting(state: StateFolder) -> None:
    """The look holds the lock for a moment."""
    for _ in range(20):
        assert not state.is_running()
        with state.locked():
            assert state.is_running()


def test_a_restart_with_the_same_model_keeps_its_date(state: StateFolder) -> None:
    first = Condition(state.save_condition)
    first.serve(4, "d", "f")
    since = first.report.serving
    again = Condition(state.save_condition, state.condition())
    again.start()
    assert again.report.serving is None, "nothing is served before the gate says so"
    again.serve(4, "d", "f")
    assert again.report.serving == since
    again.serve(5, "e", "g")
    again.serve(4, "d", "f")
    assert again.report.serving != since


def test_a_folder_of_an_older_agent_shows_what_its_history_knows(state: StateFolder) -> None:
    keep(state, 4)
    assert status(state)["held_out_images"] == 12
    (state.path / "condition.json").write_text('{"ended": null, "outcome": "", "troubles": []}')
    assert (status(state)["serving"], status(state)["held_out_images"]) == (4, 12)


def test_nothing_is_cut_off_in_a_pipe(state: StateFolder) -> None:
    keep(state, 1)
    keep(state, 2, served=False, reason=LONG)
    Condition(state.save_condition).record(TroubleKind.IMAGES, "[red] " + "x" * 200)
    printed = text(state)
    assert LONG in printed
    assert f"images: [red] {'x' * 200}\n" in printed
    assert "…" not in printed


def test_the_suggested_command_finds_the_same_folder(state: StateFolder) -> None:
    assert f"Start it: distrans-agent run --state {state.path}\n" in text(state)


def test_a_site_that_has_left_reads_so_although_no_agent_ran_since(state: StateFolder) -> None:
    state.save_identity(state.identity().model_copy(update={"has_left": True}))
    assert status(state)["ended"] == "left"
    assert "ended: left. This site has left the federation.\n" in text(state)


def test_the_date_of_a_model_of_an_earlier_run(state: StateFolder) -> None:
    served = keep(state, 4)
    Condition(state.save_condition).serve(served.number, served.digest, served.fingerprint)
    assert "When it runs, it serves model 4 (first served 20" in text(state)
