"""Responses from a coordinator or a proxy that must harm neither predictions nor the token."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support.agent_sites import App
from support.agents import AgentThread, digits_plan, enroll, write_digits
from support.api import SocketApi
from support.databases import new_database
from support.halves import server_half
from support.tampering_proxy import Reply, TamperingProxy
from support.tcp_server import TcpServer

from client_agent.coordinator.backoff import MAX_RETRY_AFTER_S, Backoff
from client_agent.coordinator.connection import open_http, require_same_origin
from client_agent.errors import ForeignUrl
from client_agent.settings import ServeOptions
from client_agent.state.folder import StateFolder
from shared.contract.errors import ForeignAnswer
from shared.http import client
from shared.http.client import request
from shared.http.client_connection import Connection
from shared.tensors.wire import digest, encode

PLAN = digits_plan("hostile", clients=9)
SERVE = ServeOptions(port=0)
AFTER_FAILURE_S = 0.01


@pytest.fixture(scope="module")
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SocketApi]:
    with SocketApi(new_database("sqlite", request, tmp_path_factory.mktemp("coordinator"))) as api:
        api.create(PLAN, start=False)
        yield api


@dataclass(frozen=True)
class Scene:
    """A running agent behind a proxy, and an application that calls it."""

    state: StateFolder
    proxy: TamperingProxy
    agent: AgentThread
    app: App


@pytest.fixture(scope="module")
def running(api: SocketApi, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Run one agent for all tests; each test must leave it unchanged."""
    folder = tmp_path_factory.mktemp("site")
    data = write_digits(folder / "data", ("0", "1"), every=20)
    with TamperingProxy(api.url) as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setattr("client_agent.coordinator.client.LONG_POLL_S", 0.05)
        patch.setattr("client_agent.coordinator.client._FIRST_PAUSE_S", 0.01)
        patch.setattr("client_agent.coordinator.client._LONGEST_PAUSE_S", 0.1)
        patch.setattr("client_agent.agent._FAILURE_PAUSE_S", AFTER_FAILURE_S)
        patch.setattr("client_agent.agent._FIRST_PAUSE_S", 0.02)
        state = enroll(api, PLAN, "north", data, folder, proxy.url)
        with AgentThread(state, serve=ServeOptions(port=0)) as agent, App(agent, data) as app:
            agent.wait_for_line("received model 0")
            yield Scene(state, proxy, agent, app)


@pytest.fixture
def scene(running: Scene) -> Iterator[Scene]:
    """Return the agent, and check after the test that it still serves model 0."""
    yield running
    assert running.app.served_round() == 0
    assert running.agent.ended_with is None
    running.proxy.tamper = lambda _path, ask: ask()
    running.proxy.wait_for("/v1/task", 3)  # the loop continues
    assert running.app.info()["agent"]["trouble"] == ""


class Elsewhere(TcpServer):
    """A server that must not be called."""

    def __init__(self) -> None:
        self.was_called = threading.Event()
        super().__init__()

    def handle(self, client: socket.socket) -> None:
        self.was_called.set()
        client.close()


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    with Elsewhere() as server:
        yield server


@dataclass
class NewModel:
    """The announcement of a model that the coordinator does not have."""

    body: bytes
    number: int = 99
    url: str = "/v1/new-model"
    sha256: str | None = None
    size_bytes: int | None = None
    personal: bytes | None = None
    answer: Reply | None = None

    def tamper(self, path: str, ask: Callable[[], Reply]) -> Reply:
        if path.startswith("/v1/task"):
            reply = ask()
            task: dict[str, Any] = json.loads(reply.body)
            task["ticket"] += "-new"
            task["model"] = {
                "number": self.number,
                "url": self.url,
                "digest": self.sha256 or digest(self.body),
                "size_bytes": len(self.body) if self.size_bytes is None else self.size_bytes,
            }
            return replace(reply, body=json.dumps(task).encode())
        if path == "/v1/new-model":
            return self.answer or Reply(200, self.body, {"ETag": f'"{digest(self.body)}"'})
        if "/personal" in path and self.personal is not None:
            return Reply(200, self.personal, {"ETag": f'"{digest(self.personal)}"'})
        return ask()


WEIGHTS = server_half(PLAN).initial_state().shared
GOOD = encode(WEIGHTS)
LACKING = encode({name: value for name, value in WEIGHTS.items() if name != "logits.bias"})
RESHAPED = encode(WEIGHTS | {"logits.bias": torch.zeros(7)})
RETYPED = encode(WEIGHTS | {"logits.bias": torch.zeros(6, dtype=torch.float64)})
NOT_FINITE = encode(WEIGHTS | {"logits.bias": torch.full((6,), float("nan"))})

ATTACKS = {
    "not safetensors": (NewModel(b"<html>an error page</html>" * 9), "The header claims"),
    "lacks a tensor": (NewModel(LACKING), "expected tensors; missing: "),
    "another shape": (NewModel(RESHAPED), r"shape \[7\], expected \[6\]"),
    "another dtype": (NewModel(RETYPED), "has dtype 'F64'"),
    "not finite": (NewModel(NOT_FINITE), "not finite"),
    "digest never matches": (NewModel(GOOD, sha256="a" * 64), "does not match its digest"),
    "longer than announced": (NewModel(GOOD, size_bytes=len(GOOD) - 1), "longer than the announced"),
    "shorter than announced": (NewModel(GOOD, size_bytes=len(GOOD) + 1), "bytes, not the announced"),
    "announced as huge": (NewModel(GOOD, size_bytes=10**13), "announced 10000000000000 bytes"),
    "personal tensors of another plan": (NewModel(GOOD, personal=encode({"x": torch.zeros(2)})), "; unexpected: "),
    "on another host": (NewModel(GOOD, url="http://127.0.0.1:{port}/model"), "which is not on"),
    "without a scheme": (NewModel(GOOD, url="//127.0.0.1:{port}/model"), "which is not on"),
    "over https": (NewModel(GOOD, url="https://127.0.0.1:{port}/model"), "which is not on"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_unusable_model_is_rejected_and_the_last_one_served(scene: Scene, elsewhere: Elsewhere, attack: str) -> None:
    model, reason = ATTACKS[attack]
    number = 1 + list(ATTACKS).index(attack)
    model = replace(model, number=number, url=model.url.format(port=elsewhere.port))
    before = scene.proxy.count("/v1/new-model")
    scene.proxy.tamper = model.tamper
    scene.agent.wait_for_line(f"model {number} is not served: .*{reason}")
    scene.proxy.wait_for("/v1/task", 2)  # the loop continues
    assert scene.app.served_round() == 0
    info = scene.app.info()
    assert [row["served"] for row in info["history"] if row["model"] == number] == [False]
    assert [trouble["kind"] for trouble in info["agent"]["troubles"]] == ["model"]
    assert scene.proxy.count("/v1/new-model") <= before + 4
    assert not elsewhere.was_called.is_set()
    assert [kept.key.number for kept in scene.state.models.all()] == [0]


@pytest.mark.parametrize(("number", "status"), [(101, 403), (102, 404), (103, 410)])
def test_a_model_that_is_refused_repeatedly_is_rejected(scene: Scene, number: int, status: int) -> None:
    detail = f"There is no model {number}."
    problem = {"type": "about:blank", "title": "No", "status": status, "code": "no", "detail": detail}
    refusal = Reply(status, json.dumps(problem).encode(), {"Content-Type": "application/problem+json"})
    scene.proxy.tamper = NewModel(GOOD, number=number, sha256=f"{number:064x}", answer=refusal).tamper
    scene.agent.wait_for_line(f"coordinator: The coordinator refused a request: {detail}")
    scene.agent.wait_for_line(f"model {number} is not served: {detail}")
    scene.proxy.wait_for("/v1/task", 2)
    assert [trouble["kind"] for trouble in scene.app.info()["agent"]["troubles"]] == ["model"]
    assert [line.reason for line in scene.state.models.history() if line.model == number] == [detail]


def test_the_agent_pauses_between_a_flood_of_broken_models(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a different digest, and the coordinator never lets the agent wait."""
    digests = (f"{number:064x}" for number in range(10**6))
    pauses: list[float | None] = []
    stopping = scene.agent._stopping
    wait = stopping.wait

    def wait_and_note(timeout: float | None = None) -> bool:
        pauses.append(timeout)
        return wait(timeout)

    monkeypatch.setattr(stopping, "wait", wait_and_note)
    flood = NewModel(GOOD, number=104, size_bytes=10**13)

    def tamper(path: str, ask: Callable[[], Reply]) -> Reply:
        return replace(flood, sha256=next(digests)).tamper(path, ask)

    before = len(scene.state.models.history())
    scene.proxy.tamper = tamper
    scene.agent.wait_for_line("model 104 is not served")
    scene.proxy.wait_for("/v1/task", 5)
    assert pauses.count(AFTER_FAILURE_S) >= 4
    assert len(scene.state.models.history()) <= before + pauses.count(AFTER_FAILURE_S) + 1


def test_an_invalid_digest_is_not_stored_in_full(scene: Scene) -> None:
    scene.proxy.tamper = NewModel(GOOD, number=105, sha256="x" * 10**6).tamper
    scene.agent.wait_for_line("model 105 is not served: 'x+' is not a valid digest")
    assert len(scene.state.models.history()[-1].digest) == 64


def test_a_redirect_is_not_followed(scene: Scene, elsewhere: Elsewhere) -> None:
    redirect = Reply(307, b"", {"Location": f"http://127.0.0.1:{elsewhere.port}/model"})
    scene.proxy.tamper = NewModel(GOOD, answer=redirect).tamper
    scene.agent.wait_for_line(r"downloading: The response \(HTTP 307\) did not come from a coordinator")
    scene.proxy.wait_for("/v1/new-model", 2)
    assert not elsewhere.was_called.is_set()
    scene.proxy.tamper = NewModel(b"not a model").tamper
    scene.agent.wait_for_line("model 99 is not served")


def test_an_endless_answer_is_cut_off(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 100_000)
    scene.proxy.tamper = lambda _path, _ask: Reply(200, b'{"action": "wait", "reason": "' + b"x" * 200_000)
    scene.agent.wait_for_line(r"asking for work: The response \(HTTP 200\) did not come from a coordinator")


def test_an_endless_error_page_is_not_read(api: SocketApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 10)
    with open_http(Connection(server=api.url), "token") as http, pytest.raises(ForeignAnswer):
        request(http, "GET", "/v1/me")


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("update_url", "http://127.0.0.1:{port}/update", "The coordinator named 'http://127.0.0.1:.*, which is not on"),
        ("max_update_bytes", 1000, r"It has \d+ bytes; the coordinator accepts 1000\."),
    ],
)
def test_an_update_that_may_not_be_sent_is_reported_and_the_loop_continues(
    api: SocketApi,
    elsewhere: Elsewhere,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    value: str | int,
    reason: str,
) -> None:
    monkeypatch.setattr("client_agent.coordinator.client.LONG_POLL_S", 0.05)
    monkeypatch.setattr("client_agent.agent._FAILURE_PAUSE_S", AFTER_FAILURE_S)
    plan = digits_plan(field.replace("_", "-"), rounds=1, clients=1)
    api.create(plan)
    data = write_digits(tmp_path / "data", ("0", "1"), every=20)

    def tamper(path: str, ask: Callable[[], Reply]) -> Reply:
        reply = ask()
        if not path.startswith("/v1/task"):
            return reply
        task = json.loads(reply.body)
        if task["round"] is not None:
            task["round"][field] = value.format(port=elsewhere.port) if isinstance(value, str) else value
        return replace(reply, body=json.dumps(task).encode())

    with TamperingProxy(api.url) as proxy:
        proxy.tamper = tamper
        state = enroll(api, plan, "north", data, tmp_path, proxy.url)
        with AgentThread(state) as agent:
            agent.wait_for_line(f"training: The update of round 1 cannot be uploaded: {reason}")
            proxy.wait_for("/v1/task", 2)
    assert not elsewhere.was_called.is_set()
    assert state.pending() is None
    assert sum("round 1: trained on" in line for line in agent.lines) == 0
    assert api.show(plan.name).rounds_done == 0


@pytest.mark.parametrize(
    ("url", "is_own"),
    [
        ("/v1/model", True),
        ("https://coordinator.example/v1/model", True),
        ("https://coordinator.example:443/v1/model", True),
        ("http://coordinator.example/v1/model", False),
        ("https://coordinator.example:8443/v1/model", False),
        ("https://coordinator.example.evil/v1/model", False),
        ("https://coordinator.example@evil/v1/model", False),
        ("https://user:secret@coordinator.example/v1/model", False),
        ("//evil/v1/model", False),
        ("v1/model", False),
        ("file:///etc/passwd", False),
        ("https://[", False),
        ("", False),
    ],
)
def test_only_the_coordinators_own_origin_is_asked(url: str, is_own: bool) -> None:
    with httpx.Client(base_url="https://coordinator.example") as http:
        if is_own:
            assert http.build_request("GET", require_same_origin(http, url)).url.host == "coordinator.example"
        else:
            with pytest.raises(ForeignUrl):
                require_same_origin(http, url)


@pytest.mark.parametrize(
    ("header", "least_s", "most_s"),
    [("7", 7, 7), ("0", 1, 1), ("9" * 5000, 300, 300), ("²", 0.5, 1.5), ("-1", 0.5, 1.5), ("soon", 0.5, 1.5)],
)
def test_retry_after_is_honored_up_to_a_limit(header: str, least_s: float, most_s: float) -> None:
    assert MAX_RETRY_AFTER_S == 300
    assert least_s <= Backoff(threading.Event(), 1.0, 60.0).next_pause_s(header) <= most_s
