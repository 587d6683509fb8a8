"""What a coordinator, or something between it and the agent, may answer without harm to predictions or to the token."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
import torch
from support.agents import AgentThread, digits_plan, enrol, write_digits
from support.api import SocketApi, new_database
from support.sites import App
from support.tampering import Reply, TamperingProxy

from client_agent.backoff import MAX_RETRY_AFTER_S, Backoff
from client_agent.errors import UnusableModel
from client_agent.network import on_own_origin, open_http
from client_agent.settings import ServeOptions
from client_agent.state import StateFolder
from shared.http import outgoing
from shared.http.connection import Connection
from shared.http.outgoing import request
from shared.methods import server_half
from shared.problems import ForeignAnswer
from shared.wire import digest, encode

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
    """A running agent behind a proxy, and an application that asks it."""

    state: StateFolder
    proxy: TamperingProxy
    agent: AgentThread
    app: App


@pytest.fixture(scope="module")
def running(api: SocketApi, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One agent for all tests here: each of them must leave it as it was."""
    folder = tmp_path_factory.mktemp("site")
    data = write_digits(folder / "data", ("0", "1"), every=20)
    with TamperingProxy(api.url) as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setattr("client_agent.coordinator.LONG_POLL_S", 0.05)
        patch.setattr("client_agent.coordinator._FIRST_PAUSE_S", 0.01)
        patch.setattr("client_agent.coordinator._LONGEST_PAUSE_S", 0.1)
        patch.setattr("client_agent.agent._AFTER_FAILURE_S", AFTER_FAILURE_S)
        patch.setattr("client_agent.agent._FIRST_PAUSE_S", 0.02)
        state = enrol(api, PLAN, "north", data, folder, proxy.url)
        with AgentThread(state, serve=ServeOptions(port=0)) as agent, App(agent, data) as app:
            agent.wait_for_line("received model 0")
            yield Scene(state, proxy, agent, app)


@pytest.fixture
def scene(running: Scene) -> Iterator[Scene]:
    """It serves model 0 before and after each test."""
    yield running
    assert running.app.served_round() == 0
    assert running.agent.ended_with is None
    running.proxy.tamper = lambda _path, ask: ask()
    running.proxy.wait_for("/v1/task", 3)  # the loop goes on
    assert running.app.info()["agent"]["trouble"] == ""


class Elsewhere:
    """A server that must never be called."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self.was_called = threading.Event()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:
            return
        self.was_called.set()
        connection.close()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join()


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    server = Elsewhere()
    yield server
    server.close()


@dataclass
class NewModel:
    """Announces a model that the coordinator does not have."""

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
    "lacks a tensor": (NewModel(LACKING), "lacks 1 tensors"),
    "another shape": (NewModel(RESHAPED), r"shape \[7\], expected \[6\]"),
    "another dtype": (NewModel(RETYPED), "has dtype 'F64'"),
    "not finite": (NewModel(NOT_FINITE), "not finite"),
    "digest never matches": (NewModel(GOOD, sha256="a" * 64), "does not match its digest"),
    "longer than announced": (NewModel(GOOD, size_bytes=len(GOOD) - 1), "longer than the"),
    "shorter than announced": (NewModel(GOOD, size_bytes=len(GOOD) + 1), "bytes, not"),
    "announced as huge": (NewModel(GOOD, size_bytes=10**13), "announces 10000000000000 bytes"),
    "personal tensors of another plan": (NewModel(GOOD, personal=encode({"x": torch.zeros(2)})), "unknown ones"),
    "on another host": (NewModel(GOOD, url="http://127.0.0.1:{port}/model"), "which is not on"),
    "without a scheme": (NewModel(GOOD, url="//127.0.0.1:{port}/model"), "which is not on"),
    "over https": (NewModel(GOOD, url="https://127.0.0.1:{port}/model"), "which is not on"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_model_that_cannot_be_used_is_rejected_and_the_last_one_served(
    scene: Scene, elsewhere: Elsewhere, attack: str
) -> None:
    model, reason = ATTACKS[attack]
    number = 1 + list(ATTACKS).index(attack)
    model = replace(model, number=number, url=model.url.format(port=elsewhere.port))
    before = scene.proxy.count("/v1/new-model")
    scene.proxy.tamper = model.tamper
    scene.agent.wait_for_line(f"model {number} is not served: .*{reason}")
    scene.proxy.wait_for("/v1/task", 2)  # the loop goes on
    assert scene.app.served_round() == 0
    info = scene.app.info()
    assert [row["served"] for row in info["history"] if row["model"] == number] == [False]
    assert [trouble["kind"] for trouble in info["agent"]["troubles"]] == ["model"]
    assert scene.proxy.count("/v1/new-model") <= before + 4
    assert not elsewhere.was_called.is_set()
    assert [kept.number for kept in scene.state.kept_models()] == [0]


@pytest.mark.parametrize(("number", "status"), [(101, 403), (102, 404), (103, 410)])
def test_a_model_that_is_refused_again_and_again_is_rejected(scene: Scene, number: int, status: int) -> None:
    detail = f"There is no model {number}."
    problem = {"type": "about:blank", "title": "No", "status": status, "code": "no", "detail": detail}
    refusal = Reply(status, json.dumps(problem).encode(), {"Content-Type": "application/problem+json"})
    scene.proxy.tamper = NewModel(GOOD, number=number, sha256=f"{number:064x}", answer=refusal).tamper
    scene.agent.wait_for_line(f"coordinator: The coordinator refuses a request: {detail}")
    scene.agent.wait_for_line(f"model {number} is not served: {detail}")
    scene.proxy.wait_for("/v1/task", 2)
    assert [trouble["kind"] for trouble in scene.app.info()["agent"]["troubles"]] == ["model"]
    assert [line.reason for line in scene.state.history() if line.model == number] == [detail]


def test_a_flood_of_broken_models_is_taken_with_pauses(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a digest of its own, and the coordinator never lets the agent wait."""
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

    before = len(scene.state.history())
    scene.proxy.tamper = tamper
    scene.agent.wait_for_line("model 104 is not served")
    scene.proxy.wait_for("/v1/task", 5)
    assert pauses.count(AFTER_FAILURE_S) >= 4
    assert len(scene.state.history()) <= before + pauses.count(AFTER_FAILURE_S) + 1


def test_a_digest_that_is_none_is_not_stored(scene: Scene) -> None:
    scene.proxy.tamper = NewModel(GOOD, number=105, sha256="x" * 10**6).tamper
    scene.agent.wait_for_line("model 105 is not served: 'x+' is not the digest of a model")
    assert len(scene.state.history()[-1].digest) == 64


def test_a_redirect_is_not_followed(scene: Scene, elsewhere: Elsewhere) -> None:
    redirect = Reply(307, b"", {"Location": f"http://127.0.0.1:{elsewhere.port}/model"})
    scene.proxy.tamper = NewModel(GOOD, answer=redirect).tamper
    scene.agent.wait_for_line(r"downloading: What answered \(307\) is not a coordinator")
    scene.proxy.wait_for("/v1/new-model", 2)
    assert not elsewhere.was_called.is_set()
    scene.proxy.tamper = NewModel(b"not a model").tamper
    scene.agent.wait_for_line("model 99 is not served")


def test_an_endless_answer_is_cut_off(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "MAX_ANSWER_BYTES", 100_000)
    scene.proxy.tamper = lambda _path, _ask: Reply(200, b'{"action": "wait", "reason": "' + b"x" * 200_000)
    scene.agent.wait_for_line(r"asking for work: What answered \(200\) is not a coordinator")


def test_an_error_page_that_never_ends_is_not_read(api: SocketApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "MAX_ANSWER_BYTES", 10)
    with open_http(Connection(server=api.url), "token") as http, pytest.raises(ForeignAnswer):
        request(http, "GET", "/v1/me")


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
            assert http.build_request("GET", on_own_origin(http, url)).url.host == "coordinator.example"
        else:
            with pytest.raises(UnusableModel):
                on_own_origin(http, url)


@pytest.mark.parametrize(
    ("header", "least_s", "most_s"),
    [("7", 7, 7), ("0", 1, 1), ("9" * 5000, 300, 300), ("²", 0.5, 1.5), ("-1", 0.5, 1.5), ("soon", 0.5, 1.5)],
)
def test_a_retry_after_is_believed_within_reason(header: str, least_s: float, most_s: float) -> None:
    assert MAX_RETRY_AFTER_S == 300
    assert least_s <= Backoff(threading.Event(), 1.0, 60.0).choose_s(header) <= most_s
