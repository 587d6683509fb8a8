"""An agent whose images, files or code fail reports it, tries again, and keeps serving."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.agent_sites import App, Peer
from support.agents import AgentThread, digits_plan, enroll, write_digits
from support.api import SocketApi
from support.databases import new_database
from support.tampering_proxy import Reply, TamperingProxy

from client_agent.agent import Agent
from client_agent.data.dataset import open_data
from client_agent.settings import ServeOptions
from client_agent.state.folder import StateFolder
from client_agent.state.kept_models import Bundle
from shared.contract.plan import FederationPlan
from shared.http.client_connection import Connection

SERVE = ServeOptions(port=0)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("client_agent.coordinator.client.LONG_POLL_S", 0.1)
    monkeypatch.setattr("client_agent.agent._FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("client_agent.agent._FAILURE_PAUSE_S", 0.05)
    monkeypatch.setattr("client_agent.agent._DATA_RETRY_S", 0.01)
    monkeypatch.setattr("client_agent.agent._MODEL_RETRY_S", 0.01)


@pytest.fixture(scope="module")
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SocketApi]:
    with SocketApi(new_database("sqlite", request, tmp_path_factory.mktemp("coordinator"))) as api:
        yield api


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_digits(tmp_path / "data", ("0", "1"), every=10)


def join(api: SocketApi, name: str, data: Path, folder: Path, **options: Any) -> tuple[FederationPlan, StateFolder]:
    plan = digits_plan(name, **options)
    api.create(plan)
    return plan, enroll(api, plan, "north", data, folder, api.url)


def held_out(plan: FederationPlan, data: Path) -> list[Path]:
    return [item for item in open_data(str(data), plan).test._items if isinstance(item, Path)]


def test_one_unreadable_held_out_image_does_not_get_models_rejected(api: SocketApi, data: Path, tmp_path: Path) -> None:
    plan, state = join(api, "one-bad-image", data, tmp_path, rounds=1, clients=1)
    bad, *good = held_out(plan, data)
    bad.write_bytes(b"not an image any more")
    with AgentThread(state, serve=SERVE) as agent, App(agent, good[0].parent) as app:
        agent.wait_for_line("The federation has finished")
        assert app.served_round() == 1
        info = app.info()
        assert [row["served"] for row in info["history"]] == [True, True]
        assert state.models.history()[-1].with_offset is not None
        assert state.models.history()[-1].with_offset.samples == len(good)
        assert [trouble["kind"] for trouble in info["agent"]["troubles"]] == ["images"]
        assert str(bad) in info["agent"]["trouble"]
        assert sum("skipped an unreadable image" in line for line in agent.lines) == 1


def test_an_unreadable_image_whose_name_is_not_utf_8_is_reported(api: SocketApi, data: Path, tmp_path: Path) -> None:
    plan, state = join(api, "latin-1", data, tmp_path, rounds=1, clients=1)
    bad = held_out(plan, data)[0]
    bad.rename(bad.with_name(os.fsdecode(b"R\xf6ntgen.png"))).write_bytes(b"not an image any more")
    with AgentThread(state, serve=SERVE) as agent, App(agent, write_digits(tmp_path / "other", ("0",))) as app:
        agent.wait_for_line("The federation has finished")
        assert app.served_round() == 1
        assert r"R\udcf6ntgen.png" in app.info()["agent"]["trouble"]
        assert [trouble.kind for trouble in state.load_status().troubles] == ["images"]


def test_without_readable_held_out_images_the_measured_model_stays_until_they_are_back(
    api: SocketApi, data: Path, tmp_path: Path
) -> None:
    plan, state = join(api, "no-image", data, tmp_path, rounds=1, clients=2)
    elsewhere = write_digits(tmp_path / "elsewhere", ("0", "1"), every=10)
    with AgentThread(state, serve=SERVE, cache_bytes=0) as agent, App(agent, elsewhere) as app:
        agent.wait_for_line("received model 0: .* accuracy")
        bodies = {file: file.read_bytes() for file in held_out(plan, data)}
        for file in bodies:
            file.unlink()
        counts = open_data(str(elsewhere), plan).report.class_counts
        Peer(api.join(plan, "peer", counts), plan, elsewhere).take_part(1)
        agent.wait_for_line("model 1 is not served: it was not measured because none of the .* can be read")
        assert app.served_round() == 0
        for file, body in bodies.items():
            file.write_bytes(body)
        agent.wait_for_line("received model 1: .* accuracy")
        assert app.served_round() == 1
        agent.wait_for_line("images: recovered from")


def test_data_missing_at_the_start_is_looked_for_again(api: SocketApi, data: Path, tmp_path: Path) -> None:
    _, state = join(api, "unmounted", data, tmp_path, rounds=1, clients=1)
    unmounted = data.rename(tmp_path / "unmounted")
    with AgentThread(state, serve=SERVE) as agent, App(agent, unmounted) as app:
        agent.wait_for_line("data: There is no data at")
        agent.wait_for_line("received model 0")
        assert app.served_round() == 0  # unmeasured, but there was no other
        unmounted.rename(data)
        agent.wait_for_line("data: recovered from")
        agent.wait_for_line("The federation has finished")
        app.wait_until_served(1)


@pytest.mark.parametrize("loss", ["unreadable", "gone"])
def test_a_round_is_trained_when_the_images_are_back(api: SocketApi, data: Path, tmp_path: Path, loss: str) -> None:
    plan, state = join(api, f"images-{loss}", data, tmp_path, rounds=1, clients=2)
    elsewhere = write_digits(tmp_path / "elsewhere", ("0", "1"), every=10)
    bodies = {file: file.read_bytes() for file in data.rglob("*.png")}
    with AgentThread(state, cache_bytes=0) as agent:
        agent.wait_for_line("received model 0: .* accuracy")
        for file in bodies:
            file.write_bytes(b"not an image any more") if loss == "unreadable" else file.unlink()
        peer = Peer(api.join(plan, "peer", open_data(str(elsewhere), plan).report.class_counts), plan, elsewhere)
        agent.wait_for_line("Round 1 could not be trained here: .* Trying again in a minute")
        for file, body in bodies.items():
            file.write_bytes(body)
        agent.wait_for_line("round 1: trained on")
        peer.take_part(1)
        agent.wait_for_line("The federation has finished")


def test_an_unexpected_error_does_not_end_the_loop(
    api: SocketApi, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, state = join(api, "unexpected", data, tmp_path, rounds=1, clients=1)
    real, failures = Agent._deliver_pending_upload, [ZeroDivisionError("oops"), KeyError("oops")]

    def fail_at_first(agent: Agent) -> None:
        if failures:
            raise failures.pop()
        real(agent)

    monkeypatch.setattr(Agent, "_deliver_pending_upload", fail_at_first)
    with AgentThread(state, serve=SERVE) as agent, App(agent, data) as app:
        agent.wait_for_line("unexpected: KeyError")
        agent.wait_for_line("unexpected: ZeroDivisionError: oops")
        agent.wait_for_line("The federation has finished")
        app.wait_until_served(1)
        assert app.info()["agent"]["trouble"] == ""


def test_an_agent_ends_when_its_web_service_fails_so_that_it_can_be_restarted(
    api: SocketApi, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, state = join(api, "no-web", data, tmp_path, rounds=1, clients=2)

    def fail(*_: object, **__: object) -> None:
        raise SystemExit(3)

    monkeypatch.setattr("uvicorn.Server.run", fail)
    with AgentThread(state, serve=SERVE) as agent:
        agent.wait()
    assert "The web service has stopped" in str(agent.ended_with)


def test_the_served_model_is_kept_even_if_a_damaged_one_would_be_preferred(
    api: SocketApi, data: Path, tmp_path: Path
) -> None:
    plan, state = join(api, "preferred", data, tmp_path, rounds=1, clients=2)
    with AgentThread(state, serve=SERVE) as agent:
        agent.wait_for_line("received model 0")
    newest, decided = state.models.load_number(0), state.models.history()[-1]

    def arrive(bundle: Bundle, *, served: bool) -> None:
        state.models.save(bundle, keep=9)
        about = {"model": bundle.number, "digest": bundle.digest, "fingerprint": bundle.fingerprint}
        state.models.add_decision(decided.model_copy(update=about | {"served": served, "record": ""}))

    arrive(replace(newest, number=7, digest="7" * 64), served=True)
    arrive(replace(newest, number=8, digest="8" * 64), served=True)
    (state.models.all()[-1].folder / "model.safetensors").write_bytes(b"damaged")
    arrive(newest, served=False)
    # Without own models: one of them could make the rejected model good enough after all.
    options = {"keep_models": 1, "alone": False, "adapt": "off"}
    with AgentThread(state, serve=SERVE, **options) as agent, App(agent, data) as app:
        assert app.served_round() == 7
        counts = open_data(str(data), plan).report.class_counts
        Peer(api.join(plan, "peer", counts), plan, data).take_part(1)
        agent.wait_for_line("received model 1")
        assert state.models.numbers() == [7, 8, 1]


def test_rejected_class_counts_are_sent_again(api: SocketApi, data: Path, tmp_path: Path) -> None:
    _, state = join(api, "counts", data, tmp_path, rounds=1, clients=2)
    next((data / "0").iterdir()).unlink()
    problem = {"type": "about:blank", "title": "No", "status": 422, "code": "no", "detail": "Not like this."}
    refusals = [Reply(422, json.dumps(problem).encode())] * 2

    def tamper(path: str, ask: Callable[[], Reply]) -> Reply:
        return refusals.pop() if path == "/v1/me" and refusals else ask()

    with TamperingProxy(api.url) as proxy:
        proxy.tamper = tamper
        identity = state.identity()
        state.create(identity.model_copy(update={"connection": Connection(server=proxy.url)}))
        with AgentThread(state, serve=SERVE) as agent:
            agent.wait_for_line("data: The coordinator rejected this site's class counts: Not like this")
            agent.wait_for_line("data: recovered from")


def test_damaged_private_tensors_stop_only_training(api: SocketApi, data: Path, tmp_path: Path) -> None:
    _, state = join(api, "damaged", data, tmp_path, rounds=2, clients=2)
    with AgentThread(state, serve=SERVE) as agent:
        agent.wait_for_line("received model 0")
    (state.path / "private.safetensors").write_bytes(b"cut off")
    with AgentThread(state, serve=SERVE) as agent, App(agent, data) as app:
        assert app.served_round() == 0
        other = enroll(api, state.identity().plan, "south", data, tmp_path, api.url)
        with AgentThread(other):
            agent.wait_for_line(r"storage: .*private\.safetensors is damaged")
        assert app.served_round() == 0
