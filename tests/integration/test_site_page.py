"""The agent's page, without a browser: who sees it, what it costs, and what it may change."""

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.agent_service import PLAN, image
from support.page_service import HTML, NOTHING_YET
from support.page_service import PageService as Agent

from client_agent.web import serve


@pytest.fixture
def agent() -> Iterator[Agent]:
    one = Agent()
    yield one
    one.queue.stop()


@pytest.fixture
def guarded() -> Iterator[Agent]:
    one = Agent(token="let-me-in")
    yield one
    one.queue.stop()


def sign_in(agent: Agent, word: str = "let-me-in") -> httpx.Response:
    answer: httpx.Response = agent.http.post("/sign-in", data={"token": word})
    return answer


@pytest.mark.parametrize("accept", ["application/json", "*/*", ""])
def test_programs_get_what_they_always_got(agent: Agent, accept: str) -> None:
    answer = agent.http.get("/", headers={"accept": accept})
    assert answer.json()["service"] == "DisTrans agent"
    assert (answer.json()["federation"], answer.json()["model"]) == ("pets", 3)
    assert agent.made == 0


def test_browsers_get_a_page_that_may_send_its_forms(agent: Agent) -> None:
    answer = agent.page()
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["referrer-policy"] == "same-origin"  # no-referrer would make browsers hide the origin
    assert "unsafe-inline" not in answer.headers["content-security-policy"]
    assert "<h1>north" in answer.text


def test_an_unchanged_page_is_neither_made_nor_sent_again(agent: Agent) -> None:
    etag = agent.page().headers["etag"]
    for _ in range(3):
        answer = agent.page(**{"if-none-match": etag})
        assert (answer.status_code, answer.content) == (304, b"")
    assert agent.made == 1


def test_what_others_wrote_is_escaped(agent: Agent) -> None:
    evil = "<script>alert(1)</script>"
    agent.info["agent"] = NOTHING_YET["agent"] | {
        "name": evil,
        "troubles": [{"kind": "data", "message": evil + "\x00", "since": 0.0, "told": ""}],
    }
    agent.info["history"] = [
        {"model": 3, "with_offset": 0.5, "without_offset": 0.5, "local": None, "candidate": evil, "test": 0.5}
        | {"validation": 0.5, "served": False, "reason": evil}
    ]
    agent.info["confusion"] = [[evil, "cat", 3]]
    text = agent.page().text
    assert "<script>alert" not in text
    assert text.count("&lt;script&gt;alert(1)") >= 4


def test_a_page_that_hangs_delays_no_prediction() -> None:
    """As it would on a state folder whose disk no longer answers."""
    agent, may_go_on, asked = Agent(port=0), threading.Event(), threading.Semaphore(0)

    def hang() -> int:
        asked.release()
        may_go_on.wait(60)
        return 0

    agent.read_version = hang
    with serve.web_server(agent.app, agent.options) as port, ThreadPoolExecutor(60) as pool:
        url = f"http://127.0.0.1:{port}"
        readers = [pool.submit(httpx.get, url, headers=HTML, timeout=60, trust_env=False) for _ in range(60)]
        assert asked.acquire(timeout=60)
        for _ in range(3):
            sent = {"content": image(), "headers": {"content-type": "image/png"}}
            assert httpx.post(f"{url}/predict", **sent, trust_env=False).status_code == 200  # type: ignore[arg-type]
            assert httpx.get(f"{url}/readyz", trust_env=False).status_code == 200
        assert not any(reader.done() for reader in readers)
        may_go_on.set()
        assert {reader.result().status_code for reader in readers} == {200}
    agent.queue.stop()


# Trying images


def test_a_form_with_images_is_answered_like_predict(agent: Agent) -> None:
    files = [("images", (f"patient-{number}.png", image(number), "image/png")) for number in range(2)]
    answer = agent.http.post("/classify", files=files)
    assert answer.status_code == 200
    wanted = agent.http.post("/predict", files=files).json()["predictions"]
    titles = re.findall(r'<strong class="chart-title">Image (\d): (\w+), ([\d.]+) %</strong>', answer.text)
    assert titles == [
        (str(one["index"] + 1), one["label"], f"{100 * one['probability']:.1f}".removesuffix(".0")) for one in wanted
    ]
    assert "patient" not in answer.text


@pytest.mark.parametrize(
    ("files", "options", "status", "words"),
    [
        ([("images", ("a.png", b"no image", "image/png"))], {}, 400, "Image 0"),
        ([("images", (f"{n}.png", image(), "image/png")) for n in range(3)], {"max_images": 2}, 422, "more than 2"),
        ([("images", ("a.png", image(), "image/png"))], {"max_body_bytes": 100}, 413, "at most 100 bytes"),
        ([("images", ("a.png", image(size=(30, 30)), "image/png"))], {"max_pixels": 100}, 413, "30×30 pixels"),
    ],
)
def test_a_form_is_under_the_limits_of_predict(
    files: list[Any], options: dict[str, Any], status: int, words: str
) -> None:
    one = Agent(**options)
    answer = one.http.post("/classify", files=files)
    assert answer.status_code == status
    assert 'role="alert"' in answer.text
    assert words in answer.text
    one.queue.stop()


def test_a_form_without_a_model_says_so(agent: Agent) -> None:
    agent.queue.model = None
    answer = agent.http.post("/classify", files=[("images", ("a.png", image()))])
    assert (answer.status_code, "There is no model yet." in answer.text) == (503, True)
    assert answer.headers["retry-after"] == "10"


@pytest.mark.parametrize(("is_allowed", "is_shown"), [(True, True), (False, False)])
def test_answers_without_the_offset_are_shown_where_allowed(is_allowed: bool, is_shown: bool) -> None:
    one = Agent(allow_offset_override=is_allowed)
    answer = one.http.post("/classify", files=[("images", ("a.png", image()))])
    assert ("without the offset" in answer.text) == is_shown
    one.queue.stop()


def test_predictions_are_counted_by_class_and_nothing_else(agent: Agent) -> None:
    for seed in range(3):
        agent.predict(image(seed))
    agent.http.post("/classify", files=[("images", ("a.png", image()))])
    assert sum(agent.queue.predicted.recent().values()) == 4
    metrics = agent.http.get("/metrics").text
    counts = re.findall(r'distrans_agent_predicted_total\{class="(\w+)"\} (\d)', metrics)
    assert sum(int(count) for _, count in counts) == 4
    assert {name for name, _ in counts} <= set(PLAN.classes)


# Pinning


def test_a_model_is_pinned_after_a_confirmation(agent: Agent) -> None:
    assert "Pin model 2?" in agent.http.get("/pin/2").text
    assert agent.http.post("/pin/2", data={"csrf": agent.csrf("/pin/2")}).headers["location"] == "/"
    assert agent.http.post("/unpin", data={"csrf": agent.csrf("/unpin")}).status_code == 303
    assert agent.pins == [2, None]


@pytest.mark.parametrize("csrf", ["", "0" * 64, "é"])
def test_a_form_that_was_not_made_here_changes_nothing(agent: Agent, csrf: str) -> None:
    assert agent.http.post("/pin/2", data={"csrf": csrf}).status_code == 403
    assert agent.http.post("/unpin", content=b"x" * 100_000).status_code == 403
    assert agent.pins == []


def test_a_model_that_is_not_kept_cannot_be_pinned(agent: Agent) -> None:
    answer = agent.http.post("/pin/7", data={"csrf": agent.csrf("/pin/7")})
    assert (answer.status_code, "Kept: 2, 3." in answer.text) == (409, True)
    for path in ("/pin/x", f"/pin/{10**18}", "/pin/-1", "/pin/²"):
        assert agent.http.get(path).status_code == 404


def test_an_agent_that_is_open_to_the_network_lets_nobody_pin() -> None:
    one = Agent(host="0.0.0.0", allow_open_predict=True)  # noqa: S104 - that is the point
    assert 'href="/pin/2"' not in one.page().text
    assert one.http.get("/pin/2").json()["code"] == "pin-not-allowed"
    one.queue.stop()


# Signing in


def test_without_a_session_there_is_only_the_sign_in_form(guarded: Agent) -> None:
    for path in ("/", "/classify", "/pin/2", "/unpin"):
        answer = guarded.http.get(path, headers=HTML)
        assert (answer.status_code, answer.headers["location"]) == (303, "/sign-in")
    for path in ("/classify", "/pin/2", "/unpin"):
        assert guarded.http.post(path, files=[("images", ("a.png", image()))]).headers["location"] == "/sign-in"
    assert guarded.made == 0
    assert guarded.pins == []
    assert guarded.queue.predicted.total() == 0
    assert "Predict token" in guarded.http.get("/sign-in").text


def test_the_right_token_opens_the_page_until_signing_out(guarded: Agent) -> None:
    assert sign_in(guarded).headers["location"] == "/"
    assert guarded.page().status_code == 200
    assert guarded.http.post("/classify", files=[("images", ("a.png", image()))]).status_code == 200
    session = dict(guarded.http.cookies)
    assert guarded.http.post("/sign-out").headers["location"] == "/sign-in"
    assert dict(guarded.http.cookies) == {}
    for name, value in session.items():
        guarded.http.cookies.set(name, value)
    assert guarded.page().headers["location"] == "/sign-in"  # a copy of the cookie is worth nothing


def test_a_session_is_for_the_page_only(guarded: Agent) -> None:
    sign_in(guarded)
    for path in ("/info", "/metrics"):
        assert guarded.http.get(path).status_code == 401
    assert guarded.predict(image()).status_code == 401
    bearer = {"authorization": "Bearer let-me-in"}
    guarded.http.cookies.clear()
    assert guarded.page(**bearer).status_code == 200
    assert guarded.http.get("/", headers=bearer).json()["federation"] == "pets"
    assert guarded.http.get("/").status_code == 401


def test_a_session_of_another_run_or_token_is_refused(guarded: Agent) -> None:
    other = Agent(token="let-me-in")
    sign_in(other)
    for name, value in other.http.cookies.items():
        guarded.http.cookies.set(name, value)
    assert guarded.page().status_code == 303
    other.queue.stop()


def test_guessing_is_slowed_down_and_says_so(guarded: Agent) -> None:
    for _ in range(10):
        assert sign_in(guarded, "guess").headers["location"] == "/sign-in?failed=token"
    assert "not the agent&#39;s predict token" in guarded.http.get("/sign-in?failed=token").text
    answer = sign_in(guarded)
    assert (answer.status_code, int(answer.headers["retry-after"]) > 0) == (429, True)
    assert guarded.http.cookies == {}
    bearer = {"authorization": "Bearer let-me-in", "content-type": "image/png"}
    assert guarded.http.post("/predict", content=image(), headers=bearer).status_code == 200


@pytest.mark.parametrize("body", [b"", b"token=", b"token=%00", b"x" * 9000, b"token=\xff"])
def test_malformed_sign_ins_open_nothing(guarded: Agent, body: bytes) -> None:
    kind = {"content-type": "application/x-www-form-urlencoded"}
    assert guarded.http.post("/sign-in", content=body, headers=kind).status_code in (303, 400)
    assert guarded.page().status_code == 303


def test_other_sites_cannot_sign_anyone_in_or_out(guarded: Agent) -> None:
    sign_in(guarded)
    for path in ("/sign-in", "/sign-out", "/unpin"):
        answer = guarded.http.post(path, headers={"origin": "https://evil.example"})
        assert answer.json()["code"] == "foreign-origin"
    assert guarded.page().status_code == 200
