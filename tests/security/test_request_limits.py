"""Limits that a caller cannot step around: with other spellings of its token, a second one, or none at all."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from support.api import Api, RawConnection, SocketApi, new_database, open_api
from support.coordinator import ADMIN_TOKEN, Site
from support.plans import small_plan

from server.api.limits import BODIES_PER_CALLER
from server.api.request_limits import Budget, FailureThrottle
from server.core.errors import NotAuthenticated, TooMany

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


@pytest.fixture
def db_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return new_database("sqlite", request, tmp_path)


class TestOneIdentityHasOneBudget:
    def test_however_it_spells_its_header(self, db_url: str) -> None:
        with open_api(db_url) as api:
            site = a_site(api)
            api.app.state.requests = Budget(0.01)  # one request, and then none for long
            answers = [
                api.http.get("/v1/me", headers={"Authorization": spelling.format(site.token)}).status_code
                for spelling in SPELLINGS * 3
            ]
            assert answers.count(200) == 1
            assert set(answers) == {200, 429, 401}  # 401 for what is no spelling of it

    def test_where_nobody_asks_for_a_token(self, db_url: str) -> None:
        """A good token is no way around the limit on routes that need none."""
        with open_api(db_url, requests_per_s=1) as api:
            site = a_site(api)
            for path in ("/readyz", "/nowhere"):
                while (answer := api.call("GET", path, site.token)).status_code != 429:
                    assert answer.status_code in (200, 404)

    def test_with_a_new_token_too(self, db_url: str) -> None:
        with open_api(db_url) as api:
            site = a_site(api)
            api.app.state.requests = Budget(0.2)  # two at once
            while api.call("GET", "/v1/me", site.token).status_code == 200:
                pass
            rotated = api.admin("POST", "/v1/federations/pets/clients/north/rotate")["token"]
            answer = api.call("GET", "/v1/me", rotated)
            assert (answer.status_code, answer.json()["code"]) == (429, "too-many-requests")

    def test_uploads(self, db_url: str) -> None:
        with SocketApi(db_url, uploads_per_client=1) as api, RawConnection(api.url) as first:
            site = a_site(api)
            api.admin("POST", "/v1/federations/pets/start")
            task = site.task()
            assert task.round is not None
            path = task.round.update_url
            first.send_head(
                "PUT", path, Authorization=f"Bearer {site.token}", Content_Length=100, Expect="100-continue"
            )
            assert first.socket.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"  # it has its slot
            for spelling in SPELLINGS[:-1]:
                with RawConnection(api.url) as second:
                    second.send_head("PUT", path, Authorization=spelling.format(site.token), Content_Length=100)
                    status, body = second.answer()
                    assert (status, json.loads(body)["code"]) == (429, "too-many-uploads")


def a_site(api: Api) -> Site:
    """A client of a federation that has not started."""
    api.create(PLAN, start=False)
    return api.join(PLAN, "north", {"cat": 1})


@pytest.mark.parametrize("tokens", [("wrong", ADMIN_TOKEN), (ADMIN_TOKEN, "wrong"), (ADMIN_TOKEN, ADMIN_TOKEN)])
def test_two_tokens_are_refused(db_url: str, tokens: tuple[str, str]) -> None:
    with open_api(db_url) as api:
        answer = api.http.get("/v1/federations", headers=[("Authorization", f"Bearer {token}") for token in tokens])
        assert (answer.status_code, answer.json()["code"]) == (400, "repeated-authorization")


class TestWithoutAKnownToken:
    def test_an_address_has_a_budget(self, db_url: str) -> None:
        with open_api(db_url, requests_per_s=0.5) as api:  # five at once
            assert api.call("GET", "/v1/federations").status_code == 200  # from now on it has a budget of its own
            tokens = (None, "invented", "invented too")
            answers = [api.call("GET", path, token) for token in tokens for path in ("/healthz", "/nowhere", "/v1/me")]
            assert [answer.status_code for answer in answers] == [200, 404, 401, 200, 429, 429, 429, 429, 429]
            assert int(answers[-1].headers["retry-after"]) >= 1
            assert api.call("GET", "/v1/federations").status_code == 200
            assert TestClient(api.app, client=("192.0.2.7", 1)).get("/healthz").status_code == 200

    def test_one_machine_has_many_addresses_of_ipv6(self, db_url: str) -> None:
        with open_api(db_url, requests_per_s=0.1) as api:  # one at once
            addresses = ["2001:db8::1", "2001:db8::2", "2001:db8:0:1::1", "::ffff:192.0.2.7", "192.0.2.7"]
            answers = [TestClient(api.app, client=(address, 1)).get("/healthz").status_code for address in addresses]
            assert answers == [200, 429, 200, 200, 429]


class TestBadTokens:
    @staticmethod
    async def fail(throttle: FailureThrottle, token: str) -> None:
        async with throttle.attempt("192.0.2.7", token):
            raise NotAuthenticated("invalid-token", "The token is not valid.")

    def test_after_many_of_them_one_at_a_time_is_looked_up(self) -> None:
        async def play() -> None:
            throttle = FailureThrottle(free_failures=2, per_s=0.001)
            async with throttle.attempt("192.0.2.7", "good"):
                pass
            for number in range(2):
                with pytest.raises(NotAuthenticated):
                    await self.fail(throttle, f"bad-{number}")
            async with throttle.attempt("192.0.2.7", "new"):  # is being looked up
                with pytest.raises(TooMany):
                    async with throttle.attempt("192.0.2.7", "another"):
                        pytest.fail("it was looked up")
                async with throttle.attempt("192.0.2.7", "good"):
                    pass  # known from before
                async with throttle.attempt("192.0.2.8", "another"):
                    pass  # from elsewhere
            async with throttle.attempt("192.0.2.7", "new"), throttle.attempt("192.0.2.7", "good"):
                pass  # both are known now
            with pytest.raises(TooMany):
                await self.fail(throttle, "good")  # revoked in the meantime
            async with throttle.attempt("192.0.2.7", "another"):
                with pytest.raises(TooMany):
                    await self.fail(throttle, "good")  # a stranger again

        asyncio.run(play())


@pytest.fixture
def slow_api(db_url: str) -> Iterator[SocketApi]:
    with SocketApi(db_url, json_body_s=0.5) as api:
        yield api


class TestBodies:
    @pytest.mark.parametrize("token", [None, "wrong", "dtc_" + 32 * "0" + "_secret"])
    @pytest.mark.parametrize("path", ["/v1/federations", "/v1/join"])
    def test_strangers_have_none_read(self, slow_api: SocketApi, path: str, token: str | None) -> None:
        """The answer comes though the body never does."""
        authorization = {} if token is None else {"Authorization": f"Bearer {token}"}
        with RawConnection(slow_api.url) as connection:
            connection.send_head(
                "POST", path, **authorization, Content_Length=8 * 1024 * 1024, Content_Type="application/json"
            )
            assert connection.answer()[0] == 401

    def test_one_caller_sends_few_at_a_time(self, db_url: str) -> None:
        """Each of them may be as large as the largest plan, and is in memory until it is complete."""
        with SocketApi(db_url) as api, ExitStack() as stack:
            site = a_site(api)
            head = {"Authorization": f"Bearer {site.token}", "Content_Type": "application/json", "Content_Length": 9}
            for _ in range(BODIES_PER_CALLER):
                connection = stack.enter_context(RawConnection(api.url))
                connection.send_head("PATCH", "/v1/me", Expect="100-continue", **head)
                assert connection.socket.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"  # it is being read
            answer = api.call("PATCH", "/v1/me", site.token, json={"class_counts": {"cat": 1}})
            assert (answer.status_code, answer.json()["code"]) == (429, "too-many-bodies")
            assert api.call("POST", "/v1/federations", json={}).status_code == 422  # others are not kept waiting
