from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from shared.http.sessions import LIFETIME_S, Session, SessionCookie, Sessions, SignedOutHere


@dataclass
class Clock:
    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def sessions(
    clock: Callable[[], float] | None = None, signed_out: SignedOutHere | None = None, **tokens: str
) -> Sessions:
    roles = {"admin": "t"} | tokens
    gone = signed_out or SignedOutHere(clock=clock or Clock())
    return Sessions({role: value.encode() for role, value in roles.items()}, gone.has, clock or Clock())


def test_a_session_is_recognized_with_its_role_by_every_process_that_knows_the_token() -> None:
    one = sessions(viewer="other")
    for role in ("admin", "viewer"):
        session = one.start(role)
        assert sessions(viewer="other").find(one.sign(session)) == session


def test_a_session_ends_when_its_token_changes_and_others_do_not() -> None:
    before, after = sessions(viewer="a"), sessions(viewer="b")
    admin, viewer = before.sign(before.start("admin")), before.sign(before.start("viewer"))
    assert after.find(admin) is not None
    assert after.find(viewer) is None


def test_a_session_ends_with_its_time_and_when_signed_out() -> None:
    clock = Clock()
    gone = SignedOutHere(clock=clock)
    one = sessions(clock, gone)
    session, other = one.start("admin"), one.start("admin")
    gone.add(session)
    assert one.find(one.sign(session)) is None
    clock.now += LIFETIME_S - 1
    assert one.find(one.sign(other)) == other
    clock.now += 1
    assert one.find(one.sign(other)) is None


def test_a_flood_of_sign_outs_ends_older_sessions_rather_than_reviving_one() -> None:
    clock = Clock()
    gone = SignedOutHere(most=3, clock=clock)
    one = sessions(clock, gone)
    ended = [one.start("admin") for _ in range(4)]
    for session in ended:
        gone.add(session)
    assert all(one.find(one.sign(session)) is None for session in ended)
    clock.now += 1
    later = one.start("admin")
    assert one.find(one.sign(later)) == later


def test_sign_outs_of_sessions_that_are_over_are_forgotten() -> None:
    clock = Clock()
    gone = SignedOutHere(most=2, clock=clock)
    one = sessions(clock, gone)
    for _ in range(5):
        gone.add(one.start("admin"))
        clock.now += LIFETIME_S + 1
    session = one.start("admin")
    assert one.find(one.sign(session)) == session


def test_a_clock_that_was_wrong_starts_no_endless_session() -> None:
    ahead = sessions(Clock(1_000_000.0 + 10 * LIFETIME_S))
    assert sessions().find(ahead.sign(ahead.start("admin"))) is None


def test_a_viewer_cannot_become_the_admin() -> None:
    one = sessions(viewer="other")
    cookie = one.sign(one.start("viewer"))
    assert one.find("admin" + cookie.removeprefix("viewer")) is None
    assert sessions().find(cookie) is None  # there are no viewers any more


@given(st.text(max_size=200))
def test_nothing_else_is_a_session(text: str) -> None:
    assert sessions().find(text) is None


@given(st.data())
def test_a_session_with_a_single_character_changed_is_refused(data: st.DataObject) -> None:
    one = sessions(viewer="t")
    value = one.sign(Session("admin", "0" * 32, 1_000_000 + LIFETIME_S))
    assert one.find(value) is not None
    place = data.draw(st.integers(0, len(value) - 1))
    other = data.draw(st.sampled_from("0123456789abcdef.xyz").filter(lambda letter: letter != value[place]))
    assert one.find(value[:place] + other + value[place + 1 :]) is None


def test_roles_with_the_same_token_cannot_be_exchanged() -> None:
    one = sessions(viewer="t")
    value = one.sign(one.start("viewer"))
    assert one.find(value.replace("viewer", "admin")) is None


def test_a_form_belongs_to_one_session() -> None:
    one = sessions()
    session, other = one.start("admin"), one.start("admin")
    assert one.is_from_form(session, one.csrf(session))
    for wrong in (one.csrf(other), "", "é", one.sign(session).rpartition(".")[2]):
        assert not one.is_from_form(session, wrong)


@pytest.mark.parametrize(
    ("url", "origin", "is_secure"),
    [
        ("http://127.0.0.1:8500", "http://127.0.0.1:8500", False),
        ("https://agent.example:8500", "https://agent.example:8500", True),
        ("http://agent.example:8500", "https://agent.example", True),  # behind a proxy with TLS
    ],
)
def test_the_cookie_is_out_of_reach_of_scripts_other_sites_and_plain_connections(
    url: str, origin: str, is_secure: bool
) -> None:
    cookie = SessionCookie("agent", per_port=True)

    def put(request: Request) -> Response:
        response = PlainTextResponse(cookie.read(request) or "nobody")
        cookie.put(response, request, "value")
        return response

    def remove(request: Request) -> Response:
        response = PlainTextResponse("bye")
        cookie.remove(response, request)
        return response

    client = TestClient(Starlette(routes=[Route("/", put), Route("/out", remove)]), base_url=url)
    first = client.get("/", headers={"origin": origin})
    name, _, rest = first.headers["set-cookie"].partition("=")
    assert name == ("__Host-agent-8500" if is_secure else "agent-8500")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(rest.split("; "))
    assert ("Secure" in rest) == is_secure
    client.cookies.clear()  # the client keeps secure cookies from plain connections, as a browser does
    assert client.get("/", headers={"cookie": f"{name}=value"}).text == "value"
    assert "Max-Age=0" in client.get("/out", headers={"cookie": f"{name}=value"}).headers["set-cookie"]
