"""Attacks on the agent's web service by web pages: foreign hosts, foreign origins, careless browsers."""

from collections.abc import Iterator

import pytest
import torch
from support.agent_service import serving
from support.api import problem_of
from support.web_agents import WebAgent, last_answer, web_agent


@pytest.fixture(scope="module")
def plain() -> Iterator[WebAgent]:
    """An agent with default options."""
    with web_agent() as one:
        yield one


class TestHosts:
    """DNS rebinding: a page points its own name at the agent, so that the browser takes both for one site."""

    @pytest.mark.parametrize("path", ["/predict", "/info", "/metrics", "/docs", "/openapi.json", "/healthz", "/none"])
    def test_requests_for_another_host_are_refused(self, plain: WebAgent, path: str) -> None:
        answer = plain.ask(path, Host="evil.example")
        assert problem_of(answer) == (421, "unknown-host")
        assert "--allowed-host" in answer.json()["next_step"]

    @pytest.mark.parametrize(
        "host",
        ["127.0.0.1.evil.example", "localhost.evil.example", "evil@127.0.0.1", "127.0.0.1@evil.example", "127.0.0.1/",
         "evil.example:8500", "[::2]", "::1", "[127.0.0.1", "127.0.0.1:80:80", "127.0.0.1 evil", "", "10.1.2.3",
         "127.1", "2130706433", "localhost..", "."],
    )  # fmt: skip
    def test_hosts_that_resemble_the_agents_are_refused(self, plain: WebAgent, host: str) -> None:
        assert plain.ask("/info", Host=host).status_code == 421

    @pytest.mark.parametrize(
        "host", ["127.0.0.1", "localhost", "LocalHost:1", "localhost.", "127.8.9.1:8500", "[::1]", "[::1]:8500"]
    )
    def test_loopback_hosts_are_served(self, plain: WebAgent, host: str) -> None:
        assert plain.ask("/predict", Host=host).status_code == 200

    def test_requests_without_a_host_or_with_two_are_refused(self, plain: WebAgent) -> None:
        for lines in (
            ["GET /info HTTP/1.0"],
            ["GET /info HTTP/1.1", "Host: 127.0.0.1", "Host: evil.example", "Connection: close"],
            ["GET /info HTTP/1.1", "Host: evil.example", "Host: 127.0.0.1", "Connection: close"],
        ):
            assert last_answer(plain.raw(*lines))[0] in (400, 421)

    def test_allowed_hosts_are_served_and_their_parents_and_children_are_not(self) -> None:
        with web_agent(allowed_hosts=("Agent.Hospital.example", "10.1.2.3")) as one:
            assert one.ask("/info", Host="agent.hospital.example:443").status_code == 200
            assert one.ask("/info", Host="10.1.2.3").status_code == 200
            assert one.ask("/info", Host="hospital.example").status_code == 421
            assert one.ask("/info", Host="x.agent.hospital.example").status_code == 421


class TestOrigins:
    """Other sites' pages can make a browser send requests, even if they cannot read the answers."""

    @pytest.mark.parametrize("path", ["/predict", "/info"])
    @pytest.mark.parametrize(
        "origin", ["https://evil.example", "null", "", "http://127.0.0.1:1", "http://localhost", "file://"]
    )
    def test_another_origin_is_refused(self, plain: WebAgent, path: str, origin: str) -> None:
        answer = plain.ask(path, Origin=origin)
        assert problem_of(answer) == (403, "foreign-origin")
        assert "access-control-allow-origin" not in answer.headers

    def test_preflights_and_cross_site_requests_without_an_origin_are_refused(self, plain: WebAgent) -> None:
        preflight = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
        assert plain.http.options("/predict", headers=preflight).status_code == 403
        assert plain.ask("/info", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors").status_code == 403

    def test_the_agents_own_pages_and_programs_are_served(self, plain: WebAgent) -> None:
        own = f"http://127.0.0.1:{plain.port}"
        assert plain.ask("/predict", Origin=own, Sec_Fetch_Site="same-origin").status_code == 200
        assert plain.ask("/info", Sec_Fetch_Site="none").status_code == 200
        # A proxy may speak HTTPS with the browser and HTTP with the agent.
        assert plain.ask("/predict", Host="localhost:1", Origin="https://localhost:1").status_code == 200

    def test_pages_behind_a_proxy_that_does_not_forward_the_host_are_served(self) -> None:
        with web_agent(allowed_hosts=("agent.hospital.example",)) as one:
            assert one.ask("/predict", Origin="https://agent.hospital.example").status_code == 200
            assert one.ask("/predict", Origin="https://agent.hospital.example:8443").status_code == 403


def test_every_response_has_security_headers(plain: WebAgent) -> None:
    answers = [plain.ask(path) for path in ("/predict", "/info", "/metrics", "/docs", "/openapi.json", "/nothing")]
    answers += [plain.ask("/info", Host="evil.example"), plain.ask("/info", Origin="null")]
    for answer in answers:
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert answer.headers["cache-control"] == "no-store"
        assert "server" not in answer.headers
        assert "strict-transport-security" not in answer.headers
        if answer.is_error:
            assert answer.json()["request_id"] == answer.headers["x-request-id"]


def test_an_unexpected_error_is_a_problem_with_the_same_headers(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_images: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with web_agent() as one:
        one.queue.model = serving(broken)
        answer = one.ask("/predict")
    assert problem_of(answer) == (500, "internal-error")
    assert answer.json()["request_id"] == answer.headers["x-request-id"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "out of memory" in caplog.text
    assert "out of memory" not in answer.text
