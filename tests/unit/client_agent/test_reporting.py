"""What the coordinator is told, and how quietly: against a real HTTP server that answers as a test says."""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from client_agent import reporting
from client_agent.condition import Condition, Phase, TroubleKind
from client_agent.reporting import Reporter, describe
from shared.schemas import StatusReport


class Listener:
    """A coordinator that takes reports, or refuses them with a status."""

    def __init__(self) -> None:
        self.status, self.reports, self.tokens = 204, list[dict[str, Any]](), list[str]()
        self.problem: dict[str, Any] | None = None
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

    def connect(self, token: str = "t") -> httpx.Client:  # noqa: S107 - nobody's
        return httpx.Client(base_url=self.url, headers={"Authorization": token}, trust_env=False)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    for pause in ("_CALM_S", "_FIRST_PAUSE_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(reporting, pause, 0.01)
    found = Listener()
    yield found
    found.close()


@contextmanager
def reporter(condition: Condition, connect: Callable[[], httpx.Client], **options: Any) -> Iterator[Reporter]:
    found = Reporter(condition, connect, **options)
    found.start()
    try:
        yield found
    finally:
        found.stop()


def test_changes_are_reported_and_so_is_the_end(listener: Listener) -> None:
    condition = Condition()
    with reporter(condition, listener.connect):
        listener.wait_until(lambda: bool(listener.reports))
        condition.enter(Phase.TRAINING, 3)
        listener.wait_until(lambda: listener.reports[-1]["detail"] == "training round 3")
        condition.record(TroubleKind.IMAGES, "7 images of /data/Jane Doe/scan.png", "7 of 9 images cannot be read.")
        listener.wait_until(lambda: bool(listener.reports[-1]["troubles"]))
    assert listener.reports[0]["activity"] == "starting"
    trouble = {"kind": "images", "message": "7 of 9 images cannot be read."}
    assert listener.reports[-1] == {"activity": "ended", "detail": "ended", "troubles": [trouble]}


def test_a_sign_of_life_is_sent_although_nothing_changes_and_although_steps_repeat(listener: Listener) -> None:
    condition = Condition()
    condition.enter(Phase.WAITING)
    with reporter(condition, listener.connect, heartbeat_s=0.05):
        for wanted in range(2, 5):
            condition.enter(Phase.WAITING)  # as after each long poll
            listener.wait_until(lambda wanted=wanted: len(listener.reports) >= wanted)  # type: ignore[misc]
    assert {report["detail"] for report in listener.reports[:-1]} == {"waiting for work"}


@pytest.mark.parametrize("status", [404, 405])
def test_an_older_coordinator_is_seldom_asked(
    listener: Listener, status: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be upgraded, or it was a proxy that answered while the coordinator restarted."""
    pauses: list[float] = []

    class Over(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0)
            listener.status = 204
            return self.is_set()

    listener.status = status
    with caplog.at_level(logging.DEBUG, "client_agent.reporting"):
        found = Reporter(Condition(), listener.connect)
        monkeypatch.setattr(found, "_over", Over())
        found.start()
        listener.wait_until(lambda: len(listener.reports) >= 2)
        found.stop()
    assert pauses[0] >= 60
    lines = [record for record in caplog.records if record.name == "client_agent.reporting"]
    assert [record.levelno for record in lines] == [logging.DEBUG]


def test_a_proxy_that_forbids_reports_for_a_while_does_not_end_them(listener: Listener) -> None:
    listener.status = 403
    with reporter(Condition(), listener.connect):
        listener.wait_until(lambda: len(listener.reports) >= 2)


@pytest.mark.parametrize("code", ["client-revoked", "client-left"])
def test_a_client_that_is_gone_reports_no_more(listener: Listener, code: str) -> None:
    listener.status = 403
    listener.problem = {"title": "Forbidden", "status": 403, "code": code, "detail": "It is gone."}
    condition = Condition()
    with reporter(condition, listener.connect) as found:
        found._thread.join(30)
        condition.enter(Phase.TRAINING, 1)
    assert len(listener.reports) == 1


def test_a_coordinator_that_is_away_is_tried_again_and_is_no_trouble(listener: Listener) -> None:
    listener.status = 503
    condition = Condition()
    with reporter(condition, listener.connect):
        listener.wait_until(lambda: len(listener.reports) >= 3)
        listener.status = 204
        condition.enter(Phase.UPLOADING, 2)
        listener.wait_until(lambda: listener.reports[-1]["activity"] == "uploading")
    assert condition.report.troubles == []


def test_one_that_cannot_be_reached_neither_fails_nor_delays_the_end(listener: Listener) -> None:
    listener.close()
    condition = Condition()
    found = Reporter(condition, listener.connect)
    found.start()
    found.stop()
    assert not found._thread.is_alive()
    assert condition.report.troubles == []


def test_a_token_that_was_replaced_on_the_disk_is_taken_up(listener: Listener) -> None:
    tokens = iter(["old", "new", "new"])
    listener.status = 401
    with reporter(Condition(), lambda: listener.connect(next(tokens, "new"))):
        listener.wait_until(lambda: "new" in listener.tokens)
        listener.status = 204
        listener.wait_until(lambda: len(listener.tokens) > 2)
    assert listener.tokens[0] == "old"


def test_no_message_leaves_the_site_unless_it_was_made_for_that() -> None:
    """Messages hold names of files, and names of files can name patients."""
    condition = Condition()
    for kind in TroubleKind:
        condition.record(kind, "/data/Jane Doe/scan.png")
    report = describe(condition)
    assert len(report.troubles) == len(TroubleKind) <= 8
    assert "Jane" not in report.model_dump_json()
    assert all(trouble.message for trouble in report.troubles)


@pytest.mark.parametrize("phase", Phase)
def test_every_step_has_its_activity(phase: Phase) -> None:
    condition = Condition()
    condition.enter(phase, 10**18)
    assert StatusReport.model_validate_json(describe(condition).model_dump_json()) == describe(condition)
