"""Limits a caller cannot evade: with another spelling of its token, a second token, or none."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from fastapi.testclient import TestClient
from support.api import Api, SocketApi, open_api, problem_of
from support.coordinator import ADMIN_TOKEN, Site
from support.plans import small_plan
from support.sockets import RawConnection

from server.api.limits import BODIES_PER_CALLER
from server.core.errors import NotAuthenticated, TooMany
from server.http.rate_limits import FailureThrottle
from shared.http.rate_limiter import RateLimiter

PLAN = small_plan(method={"name": "fedavg"}, rounds={"count": 1, "min_clients": 1})
SPELLINGS = [
    "Bearer {}",
    "bearer {}",
    "BEARER {}",
    "bEaReR {}",
    "Bearer  {}",
    "Bearer {}  ",
    " Bearer   {}",
    "Bearer\t{}",
]


class TestOneIdentityHasOneBudget:
    def test_another_spelling_of_the_header_does_not_evade_the_limit(self, sqlite_url: str) -> None:
        with open_api(sqlite_url) as api:
            site = a_site(api)
            api.app.state.requests = RateLimiter(0.01)  # one request, then none for a long time
            answers = [
                api.http.get("/v1/me", headers={"Authorization": spelling.format(site.token)}).status_code
                for spelling in SPELLINGS * 3
            ]
            assert answers.count(200) == 1
            assert set(answers) == {200, 429, 401}  # 401 for invalid spellings

    def test_open_routes_have_the_limit_too(self, sqlite_url: str) -> None:
        """A valid token does not evade it there."""
        with open_api(sqlite_url, requests_per_s=1) as api:
            site = a_site(api)
            for path in ("/readyz", "/nowhere"):
                while (answer := api.call("GET", path, site.token)).status_code != 429:
                    assert answer.status_code in (200, 404)

    def test_a_new_token_does_not_evade_the_limit(self, sqlite_url: str) -> None:
        with open_api(sqlite_url) as api:
            site = a_site(api)
            api.app.state.requests = RateLimiter(0.2)  # a burst of two
            while api.call("GET", "/v1/me", site.token).status_code == 200:
                pass
            rotated = api.admin("POST", "/v1/federations/pets/clients/north/rotate")["token"]
            answer = api.call("GET", "/v1/me", rotated)
            assert problem_of(answer) == (429, "too-many-requests")

    def test_another_spelling_does_not_evade_the_limit_on_uploads(self, sqlite_url: str) -> None:
        with SocketApi(sqlite_url, uploads_per_client=1) as api, RawConnection(api.url) as first:
            site = a_site(api)
            api.admin("POST", "/v1/federations/pets/start")
            task = site.task()
            assert task.round is not None
            path = task.round.update_url
            first.send_head(
                "PUT", path, Authorization=f"Bearer {site.token}", Content_Length=100, Expect="100-continue"
            )
            assert first.socket.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"  # it holds a slot
            for spelling in SPELLINGS[:-1]:
                with RawConnection(api.url) as second:
                    second.send_head("PUT", path, Authorization=spelling.format(site.token), Content_Length=100)
                    status, body = second.answer()
                    assert (status, json.loads(body)["code"]) == (429, "too-many-uploads")


def a_site(api: Api) -> Site:
    """Create a client of a federation that has not started."""
    api.create(PLAN, start=False)
    return api.join(PLAN, "north", {"cat": 1})


@pytest.mark.parametrize("tokens", [("wrong", ADMIN_TOKEN), (ADMIN_TOKEN, "wrong"), (ADMIN_TOKEN, ADMIN_TOKEN)])
def test_two_tokens_are_refused(sqlite_url: str, tokens: tuple[str, str]) -> None:
    with open_api(sqlite_url) as api:
        answer = api.http.get("/v1/federations", headers=[("Authorization", f"Bearer {token}") for token in tokens])
        assert problem_of(answer) == (400, "repeated-authorization")


class TestWithoutAKnownToken:
    def test_requests_without_a_known_token_count_per_address(self, sqlite_url: str) -> None:
        with open_api(sqlite_url, requests_per_s=0.5) as api:  # a burst of five
            assert api.call("GET", "/v1/federations").status_code == 200  # from now on it is counted by token
            tokens = (None, "invented", "invented too")
            answers = [api.call("GET", path, token) for token in tokens for path in ("/healthz", "/nowhere", "/v1/me")]
            assert [answer.status_code for answer in answers] == [200, 404, 401, 200, 429, 429, 429, 429, 429]
            assert int(answers[-1].headers["retry-after"]) >= 1
            assert api.call("GET", "/v1/federations").status_code == 200
            assert TestClient(api.app, client=("192.0.2.7", 1)).get("/healthz").status_code == 200

    def test_ipv6_addresses_of_one_network_count_as_one(self, sqlite_url: str) -> None:
        with open_api(sqlite_url, requests_per_s=0.1) as api:  # one at a time
            addresses = ["2001:db8::1", "2001:db8::2", "2001:db8:0:1::1", "::ffff:192.0.2.7", "192.0.2.7"]
            answers = [TestClient(api.app, client=(address, 1)).get("/healthz").status_code for address in addresses]
            assert answers == [200, 429, 200, 200, 429]


class TestBadTokens:
    @staticmethod
    async def fail(throttle: FailureThrottle, token: str) -> None:
        async with throttle.attempt("192.0.2.7", token):
            raise NotAuthenticated("invalid-token", "The token is not valid.")

    def test_after_many_failures_only_one_token_at_a_time_is_looked_up(self) -> None:
        async def play() -> None:
            throttle = FailureThrottle(free_failures=2, per_s=0.001)
            async with throttle.attempt("192.0.2.7", "good"):
                pass
            for number in range(2):
                with pytest.raises(NotAuthenticated):
                    await self.fail(throttle, f"bad-{number}")
            async with throttle.attempt("192.0.2.7", "new"):  # in progress
                with pytest.raises(TooMany):
                    async with throttle.attempt("192.0.2.7", "another"):
                        pytest.fail("it was looked up")
                async with throttle.attempt("192.0.2.7", "good"):
                    pass  # valid at its last lookup
                async with throttle.attempt("192.0.2.8", "another"):
                    pass  # another address
            async with throttle.attempt("192.0.2.7", "new"), throttle.attempt("192.0.2.7", "good"):
                pass  # both have been looked up now
            with pytest.raises(TooMany):
                await self.fail(throttle, "good")  # revoked since
            async with throttle.attempt("192.0.2.7", "another"):
                with pytest.raises(TooMany):
                    await self.fail(throttle, "good")  # unknown again

        asyncio.run(play())


@pytest.fixture
def slow_api(sqlite_url: str) -> Iterator[SocketApi]:
    with SocketApi(sqlite_url, json_body_s=0.5) as api:
        yield api


class TestBodies:
    @pytest.mark.parametrize("token", [None, "wrong", "dtc_" + 32 * "0" + "_secret"])
    @pytest.mark.parametrize("path", ["/v1/federations", "/v1/join"])
    def test_bodies_of_strangers_are_not_read(self, slow_api: SocketApi, path: str, token: str | None) -> None:
        """They get a response although the body never arrives."""
        authorization = {} if token is None else {"Authorization": f"Bearer {token}"}
        with RawConnection(slow_api.url) as connection:
            connection.send_head(
                "POST", path, **authorization, Content_Length=8 * 1024 * 1024, Content_Type="application/json"
            )
            assert connection.answer()[0] == 401

    def test_one_caller_may_send_only_a_few_bodies_at_a_time(self, sqlite_url: str) -> None:
        """Each may be as large as the largest plan, and stays in memory until it is complete."""
        with SocketApi(sqlite_url) as api, ExitStack() as stack:
            site = a_site(api)
            head = {"Authorization": f"Bearer {site.token}", "Content_Type": "application/json", "Content_Length": 9}
            for _ in range(BODIES_PER_CALLER):
                connection = stack.enter_context(RawConnection(api.url))
                connection.send_head("PATCH", "/v1/me", Expect="100-continue", **head)
                assert connection.socket.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"  # the server is reading it
            answer = api.call("PATCH", "/v1/me", site.token, json={"class_counts": {"cat": 1}})
            assert problem_of(answer) == (429, "too-many-bodies")
            assert api.call("POST", "/v1/federations", json={}).status_code == 422  # others are not affected
