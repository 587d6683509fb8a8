"""A running agent and a running coordinator, both in the test's process."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agent_sites import App, Peer
from support.agents import AgentThread, digits_plan, enroll, write_digits
from support.api import SocketApi
from support.cutting_proxy import CuttingProxy
from support.databases import new_database
from support.desk import make_overdue

from client_agent import __main__ as command_line
from client_agent.data.dataset import open_data
from client_agent.errors import AgentEnded
from client_agent.settings import ServeOptions
from client_agent.state.folder import StateFolder
from server.store.database import Database

SERVE = ServeOptions(port=0)


@pytest.fixture(autouse=True)
def _short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped agent leaves its last poll open, and the coordinator waits for it when it stops."""
    monkeypatch.setattr("client_agent.coordinator.client.LONG_POLL_S", 1.0)


@pytest.fixture(scope="module")
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SocketApi]:
    with SocketApi(new_database("sqlite", request, tmp_path_factory.mktemp("coordinator"))) as api:
        yield api


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("data"), ("0", "1"), every=4)


def command(state: StateFolder, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Run a command of `distrans-agent` that must succeed."""
    monkeypatch.setattr("sys.argv", ["distrans-agent", *arguments, "--state", str(state.path)])
    with pytest.raises(SystemExit) as ending:
        command_line.main()
    assert ending.value.code in (0, None)


def test_a_much_worse_model_is_not_served_unless_it_is_pinned(
    api: SocketApi, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In round 2 the other site sends its last layer inverted, so that the mean gives wrong answers."""
    plan = digits_plan("gate", rounds=2, clients=2, epochs=5)
    api.create(plan)
    state = enroll(api, plan, "north", data, tmp_path, api.url)
    counts = open_data(str(data), plan).report.class_counts
    peer = Peer(api.join(plan, "peer", counts), plan, data)
    with AgentThread(state, serve=SERVE, alone=False, adapt="off") as agent, App(agent, data) as app:
        peer.take_part(1)
        agent.wait_for_line("received model 1")
        assert app.served_round() == 1
        peer.take_part(2, factor=-3.0)
        agent.wait_for_line("model 2 is not served: it scores")
        agent.wait_for_line("The federation has finished")
        assert app.served_round() == 1
        info = app.info()
        assert (info["serving"]["round"], info["pinned"]) == (1, None)
        start, good, bad = info["history"]
        assert (start["model"], start["served"], good["model"], good["served"]) == (0, True, 1, True)
        assert (bad["model"], bad["served"]) == (2, False)
        assert bad["with_offset"] < good["with_offset"] - 0.1
        assert bad["reason"] == (
            f"it scores {bad['validation']:.1%}, model 1 scores {good['validation']:.1%}; "
            "--max-accuracy-drop allows a drop of 10.0%"
        )
        command(state, monkeypatch, "pin", "2")
        app.wait_until_served(2)
        assert app.info()["pinned"] == 2
        command(state, monkeypatch, "pin", "0")
        app.wait_until_served(0)
        command(state, monkeypatch, "unpin")
        app.wait_until_served(1)
    with AgentThread(state, serve=SERVE, alone=False, adapt="off") as agent, App(agent, data) as app:
        agent.wait_for_line("The federation has finished")
        assert app.served_round() == 1  # the decision survives a restart


def test_a_site_that_the_federation_hurts_serves_its_own_model_and_says_so(
    api: SocketApi, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other site inverts its last layer in both rounds."""
    plan = digits_plan("hurt", rounds=2, clients=2, epochs=5)
    api.create(plan)
    state = enroll(api, plan, "north", data, tmp_path, api.url)
    counts = open_data(str(data), plan).report.class_counts
    peer = Peer(api.join(plan, "peer", counts), plan, data)
    with AgentThread(state, serve=SERVE, adapt="off") as agent, App(agent, data) as app:
        peer.take_part(1, factor=-3.0)
        peer.take_part(2, factor=-3.0)
        agent.wait_for_line("The federation has finished")
        agent.wait_for_line("This site does better alone; its own model is served")
        for file in sorted(data.rglob("*.png"))[::10]:
            answer = app.predict(file.read_bytes())
            assert answer["predictions"][0]["label"] == file.parent.name
        about = answer["model"]
        assert (about["candidate"], about["offset_digest"], about["prior"]) == ("alone", None, "site")
        assert about["members"] == [{"base": "alone", "weight": 1.0}]
        info = app.info()
        assert info["serving"]["candidate"] == "alone"
        assert info["verdict"]["outcome"] == "better-alone"
        assert info["scores"]["served"] == info["scores"]["alone"]
        assert info["scores"]["federation"]["accuracy"] < info["scores"]["alone"]["accuracy"] - 0.3
    capsys.readouterr()
    command(state, monkeypatch, "status")
    printed = capsys.readouterr().out
    assert "When started, it will serve model 2 as alone" in printed
    assert "This site does better alone; its own model is served" in printed


def test_a_round_that_cannot_be_trained_is_waited_out(
    api: SocketApi,
    data: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plan makes training diverge: the agent reports it, keeps serving, and tries the next round."""
    pause_s = 0.2
    monkeypatch.setattr("client_agent.agent._FAILURE_PAUSE_S", pause_s)
    plan = digits_plan("diverging", clients=1, lr=100.0, weight_decay=1.0, epochs=5)
    api.create(plan)
    state = enroll(api, plan, "north", data, tmp_path, api.url)
    with caplog.at_level(logging.INFO, "httpx"), AgentThread(state, serve=SERVE) as agent, App(agent, data) as app:
        started = time.monotonic()
        said = agent.wait_for_line("Round 1 could not be trained here: .*")
        assert "lower training.lr" in said
        assert "/predict keeps answering" in said
        assert app.info()["agent"]["trouble"] in said
        assert app.served_round() == 0
        pass_deadline(api)
        polls = [record for record in caplog.records if "/v1/task" in record.getMessage()]
        assert len(polls) <= 2 + (time.monotonic() - started) / pause_s  # it pauses between polls
        api.admin("POST", f"/v1/federations/{plan.name}/resume")
        agent.wait_for_line("Round 2 could not be trained here")
        assert app.served_round() == 0
        assert agent.ended_with is None
    assert state.pending() is None
    assert state.private() == {}


def pass_deadline(api: SocketApi) -> None:
    """End the open rounds now, as their deadline would; below quorum the federation pauses."""
    db = Database(api.db_url)
    make_overdue(db)
    db.close()
    while api.show("diverging").state != "paused":
        pass


def test_the_agent_waits_for_a_coordinator_that_is_down(sqlite_url: str, data: Path, tmp_path: Path) -> None:
    plan = digits_plan(rounds=2, clients=1)
    with SocketApi(sqlite_url) as first:
        first.create(plan, start=False)
        proxy = CuttingProxy(int(first.url.rsplit(":", 1)[1]))
        state = enroll(first, plan, "north", data, tmp_path, proxy.url)
    with proxy, AgentThread(state) as agent:
        agent.wait_for_line("trying again in")
        with SocketApi(sqlite_url) as second:
            proxy.target_port = int(second.url.rsplit(":", 1)[1])
            agent.wait_for_line(r"reconnected to the coordinator after \d+ s")
            second.admin("POST", f"/v1/federations/{plan.name}/start")
            agent.wait()
            assert second.show(plan.name).state == "finished"
    assert agent.ended_with is None
    assert len([line for line in agent.lines if "reconnected" in line or "recovered" in line]) == 1


def test_a_revoked_agent_ends_with_the_reason(api: SocketApi, data: Path, tmp_path: Path) -> None:
    plan = digits_plan("revoked", clients=2)
    api.create(plan)
    state = enroll(api, plan, "north", data, tmp_path, api.url)
    with AgentThread(state) as agent:
        agent.wait_for_line("received model 0")
        api.admin("POST", f"/v1/federations/{plan.name}/clients/north/revoke")
        api.admin("POST", f"/v1/federations/{plan.name}/pause")  # news: the long poll ends
        agent.wait()
    assert isinstance(agent.ended_with, AgentEnded)
    assert "revoked by the operator" in str(agent.ended_with)


def test_a_cancelled_federation_ends_the_agent(api: SocketApi, data: Path, tmp_path: Path) -> None:
    plan = digits_plan("cancelled", clients=2)
    api.create(plan)
    state = enroll(api, plan, "north", data, tmp_path, api.url)
    with AgentThread(state) as agent:
        agent.wait_for_line("received model 0")
        api.admin("POST", f"/v1/federations/{plan.name}/cancel")
        agent.wait()
    assert isinstance(agent.ended_with, AgentEnded)
    assert "cancelled" in str(agent.ended_with)


def test_a_plan_with_thousands_of_classes_reaches_the_site(api: SocketApi, data: Path, tmp_path: Path) -> None:
    """The plan is in the model's metadata, whose limit must leave room for every plan that is accepted."""
    plan = digits_plan("many-classes", rounds=1, clients=1)
    plan = plan.model_copy(update={"classes": (*plan.classes, *(f"class number {number}" for number in range(4000)))})
    api.create(plan)
    state = enroll(api, plan, "north", data, tmp_path, api.url)
    with AgentThread(state, exit_when_finished=True) as agent:
        agent.wait_for_line("received model 1")
    assert [line.served for line in state.models.history()] == [True, True]
