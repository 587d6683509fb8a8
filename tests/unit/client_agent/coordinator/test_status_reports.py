"""Status reports, sent to a real HTTP server that answers as a test says."""

import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from client_agent.coordinator import status_reports
from client_agent.coordinator.connection import open_http
from client_agent.coordinator.status_reports import Reporter, build_report
from client_agent.status import AgentStatus, Phase, TroubleKind
from shared.contract.messages import StatusReport
from shared.http.client_connection import Connection


class Listener:
    """A coordinator that accepts reports, or refuses them with a status."""

    def __init__(self) -> None:
        self.status, self.reports, self.tokens = 204, list[dict[str, Any]](), list[str]()
        self.problem: dict[str, Any] | None = None
        self.token = "old"
        self._news = threading.Condition()
        listener = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_PUT(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                assert self.path == "/v1/me/status"
                with listener._news:
                    listener.reports.append(body)
                    listener.tokens.append(self.headers["authorization"])
                    listener._news.notify_all()
                self.send_response(listener.status)
                content = json.dumps(listener.problem).encode() if listener.problem else b""
                if listener.status != 204:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def wait_until(self, check: Callable[[], bool]) -> None:
        with self._news:
            assert self._news.wait_for(check, 30), self.reports

    def connect(self) -> httpx.Client:
        return open_http(Connection(server=self.url), lambda: self.token)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    for pause in ("_MIN_INTERVAL_S", "_FIRST_PAUSE_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(status_reports, pause, 0.01)
    found = Listener()
    yield found
    found.close()


@contextmanager
def reporter(status: AgentStatus, connect: Callable[[], httpx.Client]) -> Iterator[Reporter]:
    found = Reporter(status, connect)
    found.start()
    try:
        yield found
    finally:
        found.stop()


def test_changes_are_reported_and_so_is_the_end(listener: Listener) -> None:
    status = AgentStatus()
    with reporter(status, listener.connect):
        listener.wait_until(lambda: bool(listener.reports))
        status.enter(Phase.TRAINING, 3)
        listener.wait_until(lambda: listener.reports[-1]["detail"] == "training round 3")
        status.record(TroubleKind.IMAGES, "7 images of /data/Jane Doe/scan.png", "7 of 9 images cannot be read.")
        listener.wait_until(lambda: bool(listener.reports[-1]["troubles"]))
    assert listener.reports[0]["activity"] == "starting"
    trouble = {"kind": "images", "message": "7 of 9 images cannot be read."}
    assert listener.reports[-1] == {"activity": "ended", "detail": "ended", "troubles": [trouble]}


def test_heartbeats_are_sent_while_nothing_changes_and_while_steps_repeat(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_reports, "HEARTBEAT_S", 0.05)
    status = AgentStatus()
    status.enter(Phase.WAITING)
    with reporter(status, listener.connect):
        for wanted in range(2, 5):
            status.enter(Phase.WAITING)  # as after each long poll
            listener.wait_until(lambda wanted=wanted: len(listener.reports) >= wanted)  # type: ignore[misc]
    assert {report["detail"] for report in listener.reports[:-1]} == {"waiting for work"}


@pytest.mark.parametrize("status", [404, 405])
def test_a_coordinator_without_the_call_is_asked_rarely(
    listener: Listener, status: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be upgraded, or a proxy may have answered while the coordinator restarted."""
    pauses: list[float] = []

    class Over(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0)
            listener.status = 204
            return self.is_set()

    listener.status = status
    with caplog.at_level(logging.DEBUG, "client_agent.coordinator.status_reports"):
        found = Reporter(AgentStatus(), listener.connect)
        monkeypatch.setattr(found, "_over", Over())
        found.start()
        listener.wait_until(lambda: len(listener.reports) >= 2)
        found.stop()
    assert pauses[0] >= 60
    lines = [record for record in caplog.records if record.name == "client_agent.coordinator.status_reports"]
    assert [record.levelno for record in lines] == [logging.DEBUG]


def test_a_403_from_a_proxy_does_not_end_the_reports(listener: Listener) -> None:
    listener.status = 403
    with reporter(AgentStatus(), listener.connect):
        listener.wait_until(lambda: len(listener.reports) >= 2)


@pytest.mark.parametrize("code", ["client-revoked", "client-left"])
def test_a_revoked_or_departed_client_stops_reporting(listener: Listener, code: str) -> None:
    listener.status = 403
    listener.problem = {"title": "Forbidden", "status": 403, "code": code, "detail": "It is gone."}
    status = AgentStatus()
    with reporter(status, listener.connect) as found:
        found._thread.join(30)
        status.enter(Phase.TRAINING, 1)
    assert len(listener.reports) == 1


def test_an_unavailable_coordinator_is_retried_without_recording_a_trouble(listener: Listener) -> None:
    listener.status = 503
    status = AgentStatus()
    with reporter(status, listener.connect):
        listener.wait_until(lambda: len(listener.reports) >= 3)
        listener.status = 204
        status.enter(Phase.UPLOADING, 2)
        listener.wait_until(lambda: listener.reports[-1]["activity"] == "uploading")
    assert status.report.troubles == []


def test_an_unreachable_coordinator_neither_fails_nor_delays_the_end(listener: Listener) -> None:
    listener.close()
    status = AgentStatus()
    found = Reporter(status, listener.connect)
    found.start()
    found.stop()
    assert not found._thread.is_alive()
    assert status.report.troubles == []


def test_a_hanging_coordinator_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_reports, "_FAREWELL_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        found = Reporter(AgentStatus(), lambda: open_http(Connection(server=url)))
        found.start()
        connection, _ = silent.accept()
        with connection:
            found.stop()
            assert found._thread.is_alive()
    found._thread.join(30)


def test_a_replaced_token_is_picked_up(listener: Listener) -> None:
    listener.status = 401
    with reporter(AgentStatus(), listener.connect):
        listener.wait_until(lambda: bool(listener.tokens))
        listener.token = "new"
        listener.wait_until(lambda: "Bearer new" in listener.tokens)
    assert listener.tokens[0] == "Bearer old"


def test_full_messages_never_leave_the_site() -> None:
    """They contain file names, and file names can contain patient names."""
    status = AgentStatus()
    for kind in TroubleKind:
        status.record(kind, "/data/Jane Doe/scan.png")
    report = build_report(status)
    assert len(report.troubles) == len(TroubleKind) <= 8
    assert "Jane" not in report.model_dump_json()
    assert all(trouble.message for trouble in report.troubles)


@pytest.mark.parametrize("phase", Phase)
def test_every_step_has_its_activity(phase: Phase) -> None:
    status = AgentStatus()
    status.enter(phase, 10**18)
    assert StatusReport.model_validate_json(build_report(status).model_dump_json()) == build_report(status)
