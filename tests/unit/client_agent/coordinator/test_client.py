"""Which responses are retried, which end a call, and which end the agent; against scripted responses."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch

from client_agent.coordinator import client
from client_agent.coordinator.client import Coordinator
from client_agent.coordinator.downloads import ExpectedDownload
from client_agent.errors import AgentEnded, Ending, ForeignUrl, RequestRefused, StopRequested, TokenRefused
from shared.contract.errors import DistransError
from shared.contract.measurements import Evaluation
from shared.tensors.spec import Spec
from shared.tensors.wire import digest, encode

URL = "/v1/rounds/7/update"
RECEIPT = {"round": 7, "digest": "d", "size_bytes": 4, "received_at": 1.0}
TASK = {"action": "wait", "ticket": "t1"}
Step = httpx.Response | Exception | Callable[[httpx.Request], httpx.Response]


class Script:
    """Answers one request after the other, and keeps what was asked."""

    def __init__(self, *steps: Step) -> None:
        self._steps, self.requests = iter(steps), list[httpx.Request]()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        request.read()
        self.requests.append(request)
        step = next(self._steps)
        if isinstance(step, Exception):
            raise step
        return step if isinstance(step, httpx.Response) else step(request)

    @property
    def calls(self) -> list[str]:
        return [f"{request.method} {request.url.path}" for request in self.requests]


def problem(status: int, code: str, **headers: str) -> httpx.Response:
    body = {"title": "No", "status": status, "code": code, "detail": f"Because of {code}."}
    return httpx.Response(status, json=body, headers=headers)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(client, "_LONGEST_PAUSE_S", 0.001)


@pytest.fixture
def connect() -> Iterator[Callable[..., Coordinator]]:
    opened: list[httpx.Client] = []

    def open_scripted(script: Script, **options: object) -> Coordinator:
        http = httpx.Client(base_url="https://coordinator.example", transport=httpx.MockTransport(script))
        opened.append(http)
        return Coordinator(http, threading.Event(), **options)  # type: ignore[arg-type]  # passed through

    yield open_scripted
    for http in opened:
        http.close()


@pytest.mark.parametrize(
    "failure",
    [
        httpx.Response(500),
        httpx.Response(503),
        httpx.Response(429),
        httpx.Response(408),
        httpx.Response(403, text="<html>a proxy</html>"),
        httpx.Response(200, text="<html>a portal</html>"),
        httpx.ReadError("reset"),
        httpx.ConnectTimeout("late"),
    ],
    ids=str,
)
def test_temporary_failures_are_retried_and_reported(connect: Callable[..., Coordinator], failure: Step) -> None:
    problems: list[str] = []
    script = Script(failure, failure, httpx.Response(200, json=TASK))
    coordinator = connect(script, on_problem=problems.append)
    assert coordinator.task("none").ticket == "t1"
    assert [bool(one) for one in problems] == [True, True, False]
    assert (coordinator.reachable, coordinator.problem) == (True, "")
    waits = [request.url.params["wait"] for request in script.requests]
    assert waits == [str(client.LONG_POLL_S), "0.0", "0.0"], "after an outage it asks without waiting"


def test_the_pause_that_the_coordinator_asks_for_is_kept(
    connect: Callable[..., Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def note(_backoff: object, retry_after: str = "") -> float:
        asked.append(retry_after)
        return 0.0

    monkeypatch.setattr(client.Backoff, "next_pause_s", note)
    script = Script(httpx.Response(503, headers={"retry-after": "7"}), httpx.Response(200, json=TASK))
    connect(script).task("none")
    assert asked == ["7"]


@pytest.mark.parametrize("status", [400, 404, 409, 410, 413, 422])
def test_a_refusal_is_raised_at_once(connect: Callable[..., Coordinator], status: int) -> None:
    script = Script(problem(status, "round-closed"))
    with pytest.raises(RequestRefused, match="Because of round-closed") as caught:
        connect(script).upload(URL, b"body", digest(b"body"))
    assert (caught.value.status, caught.value.code, len(script.requests)) == (status, "round-closed", 1)


@pytest.mark.parametrize(("code", "ending"), [("client-revoked", Ending.REVOKED), ("client-left", Ending.LEFT)])
def test_a_client_that_is_gone_ends_the_agent(connect: Callable[..., Coordinator], code: str, ending: Ending) -> None:
    with pytest.raises(AgentEnded) as caught:
        connect(Script(problem(403, code))).me()
    assert caught.value.ending == ending


def test_a_refused_token_ends_the_agent_unless_it_was_just_replaced(connect: Callable[..., Coordinator]) -> None:
    tokens = iter(["old", "new", "new", "new"])
    script = Script(problem(401, "invalid-token"), problem(401, "invalid-token"))
    with pytest.raises(TokenRefused) as caught:
        connect(script, token=lambda: next(tokens)).task("none")
    assert (caught.value.token, len(script.requests)) == ("new", 2)


def test_a_score_is_given_up_after_some_tries(connect: Callable[..., Coordinator]) -> None:
    script = Script(*[httpx.Response(503)] * 9)
    with pytest.raises(DistransError, match="reporting a score: the coordinator answered 503"):
        connect(script).report_evaluation(3, Evaluation(samples=4, correct=3, loss_sum=1.0))
    assert len(script.requests) == client._SCORE_TRIES


def test_a_stop_request_ends_the_retries(connect: Callable[..., Coordinator]) -> None:
    coordinator = connect(Script())

    def stop(_request: httpx.Request) -> httpx.Response:
        coordinator._stopping.set()
        return httpx.Response(503)

    coordinator._http = httpx.Client(
        base_url="https://coordinator.example", transport=httpx.MockTransport(Script(stop))
    )
    with coordinator._http, pytest.raises(StopRequested):
        coordinator.task("none")


class TestUploads:
    def test_the_url_of_the_task_is_used(self, connect: Callable[..., Coordinator]) -> None:
        script = Script(httpx.Response(200, json=RECEIPT))
        connect(script).upload("/elsewhere/7?part=1", b"body", digest(b"body"))
        assert script.calls == ["PUT /elsewhere/7"]
        assert script.requests[0].url.query == b"part=1"

    @pytest.mark.parametrize("url", ["https://evil.example/v1/rounds/7/update", "//evil.example/update", "update"])
    def test_nothing_is_sent_to_another_host(self, connect: Callable[..., Coordinator], url: str) -> None:
        script = Script()
        with pytest.raises(ForeignUrl):
            connect(script).upload(url, b"body", digest(b"body"))
        with pytest.raises(ForeignUrl):
            connect(script).check_upload(url)
        assert script.requests == []


class TestResumableUploads:
    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(client, "RESUMABLE_BYTES", 3)
        monkeypatch.setattr(client, "PIECE_BYTES", 2)

    def head(self, offset: str, **headers: str) -> httpx.Response:
        return httpx.Response(204, headers={"upload-offset": offset} | headers)

    def test_only_the_missing_part_is_sent(self, connect: Callable[..., Coordinator]) -> None:
        script = Script(self.head("4"), httpx.Response(200, json=RECEIPT))
        coordinator = connect(script)
        assert coordinator.upload(URL, b"abcdefg", digest(b"abcdefg")).round == 7
        assert script.calls == [f"HEAD {URL}", f"PATCH {URL}"]
        assert script.requests[1].content == b"efg"
        assert script.requests[1].headers["upload-offset"] == "4"
        assert coordinator.bytes_sent == 3

    def test_a_conflict_about_the_offset_starts_over_with_the_coordinators(
        self, connect: Callable[..., Coordinator]
    ) -> None:
        conflict = problem(409, "wrong-offset", **{"upload-offset": "6"})
        script = Script(self.head("4"), conflict, self.head("6"), httpx.Response(200, json=RECEIPT))
        connect(script).upload(URL, b"abcdefg", digest(b"abcdefg"))
        assert [request.content for request in script.requests] == [b"", b"efg", b"", b"g"]

    def test_another_conflict_is_a_refusal(self, connect: Callable[..., Coordinator]) -> None:
        script = Script(self.head("0"), problem(409, "another-update"))
        with pytest.raises(RequestRefused, match="another-update"):
            connect(script).upload(URL, b"abcdefg", digest(b"abcdefg"))

    @pytest.mark.parametrize(
        ("status", "code"), [(403, "not-a-participant"), (404, "no-such-round"), (410, "round-closed")]
    )
    def test_a_refused_head_is_a_refusal(self, connect: Callable[..., Coordinator], status: int, code: str) -> None:
        with pytest.raises(RequestRefused) as caught:
            connect(Script(httpx.Response(status))).upload(URL, b"abcdefg", digest(b"abcdefg"))
        assert (caught.value.status, caught.value.code) == (status, code)

    def test_a_head_without_a_valid_token_ends_the_agent(self, connect: Callable[..., Coordinator]) -> None:
        with pytest.raises(TokenRefused):
            connect(Script(httpx.Response(401))).upload(URL, b"abcdefg", digest(b"abcdefg"))

    @pytest.mark.parametrize("first", [httpx.Response(503), httpx.Response(200), httpx.Response(204)], ids=str)
    def test_an_unusable_head_is_retried(self, connect: Callable[..., Coordinator], first: httpx.Response) -> None:
        script = Script(first, self.head("0"), httpx.Response(200, json=RECEIPT))
        connect(script).upload(URL, b"abcdefg", digest(b"abcdefg"))
        assert script.calls == [f"HEAD {URL}", f"HEAD {URL}", f"PATCH {URL}"]

    def test_a_complete_upload_is_only_confirmed(self, connect: Callable[..., Coordinator]) -> None:
        script = Script(self.head("", **{"upload-complete": "?1"}), httpx.Response(200, json=RECEIPT))
        connect(script).upload(URL, b"abcdefg", digest(b"abcdefg"))
        assert script.requests[1].content == b""


TENSORS = {"w": torch.arange(4.0)}
BODY = encode(TENSORS)
ETAG = f'"{digest(BODY)}"'


class TestDownloads:
    @pytest.fixture
    def expected(self) -> ExpectedDownload:
        return ExpectedDownload([Spec.of(TENSORS)])

    def test_a_refused_download_is_a_refusal(
        self, connect: Callable[..., Coordinator], expected: ExpectedDownload, tmp_path: Path
    ) -> None:
        with pytest.raises(RequestRefused, match="no-such-model"):
            connect(Script(problem(404, "no-such-model"))).download("/v1/model", tmp_path / "part", expected)

    def test_a_busy_coordinator_is_asked_again(
        self, connect: Callable[..., Coordinator], expected: ExpectedDownload, tmp_path: Path
    ) -> None:
        script = Script(
            problem(503, "busy"), httpx.Response(200, stream=httpx.ByteStream(BODY), headers={"etag": ETAG})
        )
        coordinator = connect(script)
        assert coordinator.download("/v1/model", tmp_path / "part", expected) == BODY
        assert coordinator.bytes_received == len(BODY)

    def test_a_complete_partial_file_is_not_downloaded_again(
        self, connect: Callable[..., Coordinator], expected: ExpectedDownload, tmp_path: Path
    ) -> None:
        (tmp_path / "part").write_bytes(BODY)
        (tmp_path / "part.etag").write_text(ETAG)
        script = Script(httpx.Response(416))
        assert connect(script).download("/v1/model", tmp_path / "part", expected) == BODY
        assert script.requests[0].headers["range"] == f"bytes={len(BODY)}-"
