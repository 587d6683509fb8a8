"""`distrans-agent status`: whether the agent is running, what it serves and since when."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from typer.testing import CliRunner

from client_agent.__main__ import app
from client_agent.model_key import ModelKey
from client_agent.settings import Identity
from client_agent.state.decisions import GateDecision
from client_agent.state.folder import StateFolder
from client_agent.state.kept_models import Bundle
from client_agent.status import AgentStatus, HoldoutSizes, TroubleKind
from shared.contract.measurements import Evaluation
from shared.contract.plan import validate_plan
from shared.http.client_connection import Connection

PLAN = validate_plan(
    {
        "name": "pets",
        "classes": ["cat", "dog"],
        "image": {"channels": 1, "height": 14, "width": 14},
        "method": {"name": "fedavg"},
    }
)
LONG = "it scores 10.0%, model 1 scores 90.0%; --max-accuracy-drop allows a drop of 10.0%: wider than 80 columns"


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
    state.models.save(bundle, keep=5)
    score = Evaluation(samples=12, correct=9, loss_sum=1.0)
    state.models.add_decision(
        GateDecision(
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


def test_a_running_agent_is_shown_with_the_model_it_serves_and_since_when(state: StateFolder) -> None:
    served = keep(state, 4)
    keep(state, 5)  # approved, but the agent could not build it and answers with model 4
    with state.locked():
        running = AgentStatus(state.save_status)
        running.serve(served.key)
        running.note_data(HoldoutSizes(validation=60, test=60, is_split=True))
        about = status(state)
        assert (about["running"], about["serving"], about["held_out_images"]) == (True, 4, 120)
        assert about["serving_since"] == pytest.approx((state.path / "condition.json").stat().st_mtime, abs=60)
        assert "The agent is running.\nServing model 4 since 20" in text(state)
        assert "Held-out images: 120 (60 choose what is served, 60 test it)\n" in text(state)


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
    assert "When started, it will serve model 4." in text(state)


def test_status_does_not_keep_an_agent_from_starting(state: StateFolder) -> None:
    """It holds the lock for a moment."""
    for _ in range(20):
        assert not state.is_running()
        with state.locked():
            assert state.is_running()


def test_a_restart_with_the_same_model_keeps_its_date(state: StateFolder) -> None:
    first = AgentStatus(state.save_status)
    first.serve(ModelKey(4, "d", "f"))
    since = first.report.serving
    again = AgentStatus(state.save_status, state.load_status())
    again.start()
    assert again.report.serving is None, "nothing is served before the gate says so"
    again.serve(ModelKey(4, "d", "f"))
    assert again.report.serving == since
    again.serve(ModelKey(5, "e", "g"))
    again.serve(ModelKey(4, "d", "f"))
    assert again.report.serving != since


def test_an_older_agents_held_out_images_are_taken_from_its_history(state: StateFolder) -> None:
    keep(state, 4)
    assert status(state)["held_out_images"] == 12
    (state.path / "condition.json").write_text('{"ended": null, "outcome": "", "troubles": []}')
    assert (status(state)["serving"], status(state)["held_out_images"]) == (4, 12)


def test_output_is_not_truncated_when_piped(state: StateFolder) -> None:
    keep(state, 1)
    keep(state, 2, served=False, reason=LONG)
    AgentStatus(state.save_status).record(TroubleKind.IMAGES, "[red] " + "x" * 200)
    printed = text(state)
    assert LONG in printed
    assert f"images: [red] {'x' * 200}\n" in printed
    assert "…" not in printed


def test_the_suggested_command_finds_the_same_folder(state: StateFolder) -> None:
    assert f"Start it: distrans-agent run --state {state.path}\n" in text(state)


def test_a_site_that_has_left_is_shown_as_such_even_if_no_agent_ran_since(state: StateFolder) -> None:
    state.save_identity(state.identity().model_copy(update={"has_left": True}))
    assert status(state)["ended"] == "left"
    assert "ended: left. This site has left the federation.\n" in text(state)


@pytest.mark.parametrize("is_running", [False, True])
def test_a_pinned_model_that_is_damaged_is_explained(state: StateFolder, is_running: bool) -> None:
    keep(state, 3, served=False, reason="worse")
    keep(state, 4, served=False, reason="worse")
    state.models.pin(4)
    assert "/predict is pinned to model 4.\n" in text(state)
    (state.models.all()[-1].folder / "model.safetensors").write_bytes(b"damaged")
    with state.locked() if is_running else nullcontext():
        printed = text(state)
        assert "has changed since it was written." in str(status(state)["pin_problem"])
    assert ("No model is being served." if is_running else "There is no model to serve.") in printed
    assert "Model 4 is pinned but cannot be served. " in printed
    assert "model.safetensors has changed since it was written. " in printed
    assert f"Run distrans-agent unpin --state {state.path}, or pin another model: 3.\n" in printed


def test_the_date_of_a_model_from_an_earlier_run_is_shown(state: StateFolder) -> None:
    served = keep(state, 4)
    AgentStatus(state.save_status).serve(served.key)
    assert "When started, it will serve model 4 (first served 20" in text(state)
