"""Security headers, limits, admin networks and trusted proxies of the coordinator."""

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from support.api import Api, SocketApi, open_api, problem_of
from support.coordinator import ADMIN_TOKEN, Site, running
from support.plans import small_plan, update_body
from support.sockets import RawConnection

from server.http.proxies import Proxies, certificate_fingerprint
from server.service.settings import from_environment, split_list
from shared.contract.errors import DistransError
from shared.http.server_protocol import MAX_HEAD_BYTES, Protocol

PLAN = small_plan(method={"name": "fedavg"}, rounds={"count": 1, "min_clients": 1})
ADMIN = {"Authorization": f"Bearer {ADMIN_TOKEN}"}


def test_the_docs_page_may_run_only_its_own_script(sqlite_url: str) -> None:
    with open_api(sqlite_url) as api:
        policy = api.call("GET", "/docs", token=None).headers["content-security-policy"]
    parts = dict(part.split(" ", 1) for part in policy.split("; "))
    assert parts["script-src"].startswith("'self' 'sha256-")
    assert "unsafe" not in parts["script-src"]
    assert parts["default-src"] == "'none'"


def test_every_response_has_security_headers(sqlite_url: str) -> None:
    with open_api(sqlite_url) as api:
        for path, status in (("/healthz", 200), ("/v1/federations", 401), ("/nowhere", 404)):
            answer = api.call("GET", path, token=None)
            assert answer.status_code == status
            policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
            assert policy["default-src"] == "'none'"
            assert policy["script-src"] == policy["connect-src"] == "'self'"
            assert policy["frame-ancestors"] == "'none'"
            assert "unsafe" not in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["x-frame-options"] == "DENY"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert answer.headers["cache-control"] == "no-store"
            assert not {"server", "strict-transport-security", "access-control-allow-origin"} & answer.headers.keys()


def test_the_server_names_no_program_and_sends_hsts_only_over_https(sqlite_url: str) -> None:
    with SocketApi(sqlite_url, trusted_proxies=("127.0.0.1",)) as api:
        plain = api.http.get("/healthz")
        assert "server" not in plain.headers
        assert "strict-transport-security" not in plain.headers
        behind_tls = api.http.get("/healthz", headers={"X-Forwarded-Proto": "https"})
        assert behind_tls.headers["strict-transport-security"].startswith("max-age=")


def test_models_keep_their_own_cache_rules(sqlite_url: str) -> None:
    with open_api(sqlite_url) as api:
        api.create(PLAN)
        answer = api.call("GET", "/v1/federations/pets/model")
        assert answer.headers.get_list("cache-control") == ["private, no-cache"]


def test_only_configured_origins_may_call(sqlite_url: str) -> None:
    page = {"Origin": "https://dashboard.example"}
    with open_api(sqlite_url) as api:
        assert "access-control-allow-origin" not in api.call("GET", "/healthz", headers=page).headers
    with open_api(sqlite_url, cors_origins=("https://dashboard.example",)) as api:
        allowed = api.call("GET", "/healthz", headers=page).headers
        assert allowed["access-control-allow-origin"] == "https://dashboard.example"
        stranger = api.call("GET", "/healthz", headers={"Origin": "https://elsewhere.example"}).headers
        assert "access-control-allow-origin" not in stranger


def test_too_many_requests_get_429_with_retry_after(sqlite_url: str) -> None:
    with open_api(sqlite_url, requests_per_s=0.5) as api:  # a burst of five, then one every two seconds
        answers = [api.call("GET", "/v1/federations") for _ in range(6)]
        assert [answer.status_code for answer in answers] == [200] * 5 + [429]
        assert answers[-1].json()["code"] == "too-many-requests"
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 2
        assert answers[-1].headers["content-type"] == "application/problem+json"
        assert api.call("GET", "/healthz", token=None).status_code == 200
        assert api.call("GET", "/v1/federations", token="another").json()["code"] == "invalid-token"


def test_uploads_of_one_client_are_limited(sqlite_url: str) -> None:
    with SocketApi(sqlite_url, uploads_per_client=1) as api:
        api.create(PLAN)
        site = api.join(PLAN, "left", {"cat": 1})
        round_id = site.task().round.id
        body = update_body(PLAN, {})
        with RawConnection(api.url) as slow:
            path = f"/v1/rounds/{round_id}/update"
            slow.send_head("PUT", path, Authorization=f"Bearer {site.token}", Content_Length=len(body))
            slow.send(body[:100])
            wait_until_uploading(api)
            second = site.put(round_id, body)
            assert problem_of(second) == (429, "too-many-uploads")
            assert int(second.headers["retry-after"]) > 0
            assert site.http.head(path, headers=site.headers).status_code == 200  # HEAD is not an upload
            slow.send(body[100:])
            assert slow.answer()[0] == 200
        assert site.put(round_id, body).status_code == 200


def wait_until_uploading(api: Api) -> None:
    from server.store.tables import Transfer

    while True:
        with api.app.state.ctx.db.read() as session:
            if session.query(Transfer).count():
                return


def test_a_body_that_never_arrives_times_out(sqlite_url: str) -> None:
    with SocketApi(sqlite_url, json_body_s=0.2) as api, RawConnection(api.url) as slow:
        slow.send_head("POST", "/v1/federations", **ADMIN, Content_Length=100, Content_Type="application/json")
        slow.send(b"{")
        status, body = slow.answer()
        assert (status, json.loads(body)["code"]) == (408, "body-too-slow")


@pytest.fixture
def plain_api(sqlite_url: str) -> Iterator[SocketApi]:
    with SocketApi(sqlite_url) as api:
        yield api


@pytest.mark.parametrize("line", ["X-Long: " + "x" * MAX_HEAD_BYTES, "X-Many: x\r\n" * (MAX_HEAD_BYTES // 10)])
def test_headers_that_are_too_large_are_refused(plain_api: SocketApi, line: str) -> None:
    with RawConnection(plain_api.url) as connection:
        connection.send(f"GET /healthz HTTP/1.1\r\nHost: coordinator\r\n{line}\r\n\r\n".encode())
        status, body = connection.answer()
        assert (status, json.loads(body)["code"]) == (431, "head-too-large")


def test_an_endless_header_line_is_refused(plain_api: SocketApi) -> None:
    with RawConnection(plain_api.url) as connection:
        connection.send(b"GET /healthz HTTP/1.1\r\nX-Long: " + b"x" * (MAX_HEAD_BYTES + 1))
        assert connection.answer()[0] == 431


def test_bytes_that_are_not_http_are_refused(plain_api: SocketApi, caplog: pytest.LogCaptureFixture) -> None:
    with RawConnection(plain_api.url) as connection, caplog.at_level(logging.ERROR):
        connection.send(b"\x16\x03\x01 this is TLS\r\n\r\n")
        status, body = connection.answer()
        assert (status, json.loads(body)["code"]) == (400, "invalid-http")


@pytest.mark.parametrize(("sent", "expected"), [(b"", b""), (b"GET /healthz HT", b"HTTP/1.1 408 ")])
def test_headers_that_never_arrive_time_out(
    plain_api: SocketApi, monkeypatch: pytest.MonkeyPatch, sent: bytes, expected: bytes
) -> None:
    monkeypatch.setattr(Protocol, "head_s", 0.1)
    with RawConnection(plain_api.url) as connection:
        connection.send(sent)
        assert connection.socket.recv(13) == expected


def call_from(api: Api, address: str, path: str = "/v1/audit", **headers: str) -> Any:
    client = TestClient(api.app, client=(address, 1234))
    return client.get(path, headers=ADMIN | {name.replace("_", "-"): value for name, value in headers.items()})


@pytest.mark.parametrize(
    ("address", "status"),
    [("10.1.2.3", 200), ("192.0.2.7", 200), ("::ffff:10.1.2.3", 200), ("192.0.2.8", 403), ("2001:db8::1", 403)],
)
def test_the_admin_token_is_accepted_from_its_networks_only(sqlite_url: str, address: str, status: int) -> None:
    with open_api(sqlite_url, admin_networks=("10.0.0.0/8", "192.0.2.7")) as api:
        for path in ("/v1/audit", "/metrics", "/v1/federations"):
            answer = call_from(api, address, path)
            assert answer.status_code == status
            assert status == 200 or answer.json()["code"] == "admin-network"
        assert call_from(api, address, "/healthz").status_code == 200


def last_address(api: Api) -> str:
    return str(api.admin("GET", "/v1/audit")[-1]["address"])


def test_only_trusted_proxies_may_set_the_callers_address(sqlite_url: str) -> None:
    with open_api(sqlite_url, trusted_proxies=("10.0.0.0/8",)) as api:
        api.create(PLAN)
        for number, (peer, said, believed) in enumerate(
            [
                ("10.0.0.1", "198.51.100.9", "198.51.100.9"),
                ("10.0.0.1", "203.0.113.5, 198.51.100.9", "198.51.100.9"),  # the first was sent by the caller
                ("198.51.100.1", "203.0.113.5", "198.51.100.1"),
            ]
        ):
            invite = api.admin("POST", "/v1/federations/pets/invites")["token"]
            answer = TestClient(api.app, client=(peer, 1)).post(
                "/v1/join",
                headers={"Authorization": f"Bearer {invite}", "X-Forwarded-For": said},
                json={"name": f"site-{number}", "class_counts": {"cat": 1}},
            )
            assert answer.status_code == 201
            assert last_address(api) == believed


@pytest.mark.parametrize("sent", ["", "/federated"], ids=["the proxy takes the prefix off", "it leaves it"])
def test_api_works_below_a_root_path(sqlite_url: str, sent: str) -> None:
    with open_api(sqlite_url, root_path="/federated", max_json_bytes=5_000) as api:
        assert api.call("GET", sent + "/healthz", token=None).status_code == 200
        home = api.http.get(sent + "/", follow_redirects=False)
        assert home.headers["location"] == "/federated/sign-in"
        assert api.call("GET", sent + "/openapi.json").json()["servers"] == [{"url": "/federated"}]
        created = api.call("POST", sent + "/v1/federations", json=PLAN.model_dump(mode="json"))
        assert created.status_code == 201
        api.admin("POST", sent + "/v1/federations/pets/start")
        site = Site(api.http, PLAN, "left", api.join(PLAN, "left", {"cat": 1}).token)
        task = site.task()
        body = update_body(PLAN, {})
        assert len(body) > 5_000  # above the JSON limit: uploads are recognized below the prefix, too
        sent_update = api.http.put(sent + task.round.update_url, content=body, headers=site.headers)
        assert sent_update.status_code == 200


def test_a_path_that_only_starts_like_the_prefix_is_not_below_it() -> None:
    seen: list[str] = []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        seen.append(scope["path"])

    async def call(path: str) -> None:
        scope = {"type": "http", "path": path, "raw_path": path.encode(), "headers": [], "client": ("10.0.0.1", 1)}
        await Proxies(app, (), None, "/fed")(scope, None, None)  # type: ignore[arg-type]  # not called

    for path in ("/federations", "/fed/x", "/fed"):
        asyncio.run(call(path))
    assert seen == ["/fed/federations", "/fed/x", "/fed"]


@pytest.mark.parametrize(
    "environment",
    [
        {"DISTRANS_ADMIN_NETWORKS": "10.0.0.0/8,office"},
        {"DISTRANS_REQUESTS_PER_S": "many"},
        {"DISTRANS_REQUESTS_PER_S": "nan"},
        {"DISTRANS_UPLOADS_PER_CLIENT": "-1"},
        {"DISTRANS_DOWNLOADS_PER_CLIENT": "some"},
        {"DISTRANS_POLLS_PER_CLIENT": "2.5"},
        {"DISTRANS_HISTORY_READS_PER_CLIENT": "-1"},
    ],
)
def test_invalid_settings_are_named(environment: dict[str, str]) -> None:
    with pytest.raises(DistransError, match=next(iter(environment))):
        from_environment(environment)


def test_settings_come_from_environment_variables() -> None:
    given = from_environment({"DISTRANS_REQUESTS_PER_S": "2.5", "DISTRANS_ADMIN_NETWORKS": "10.0.0.0/8, ::1"})
    assert given["requests_per_s"] == 2.5
    assert given["admin_networks"] == ("10.0.0.0/8", "::1")
    assert split_list("") == ()


def test_invalid_certificate_header_has_no_fingerprint() -> None:
    for text in ("", "%%%", "x" * 20_000, "-----BEGIN%20CERTIFICATE-----"):
        assert certificate_fingerprint(text) is None


def test_no_secret_is_ever_logged(tmp_path: Path) -> None:
    """With everything logged, through joining, polling, uploading, rotating, and failing calls."""
    with running(f"sqlite:///{tmp_path / 'coordinator.db'}", tmp_path, "--log-level", "debug") as coordinator:
        coordinator.create(PLAN)
        invite = coordinator.admin("POST", "/v1/federations/pets/invites")["token"]
        unused = coordinator.admin("POST", "/v1/federations/pets/invites")["token"]
        joined = {"Authorization": f"Bearer {invite}"}
        body = {"name": "left", "class_counts": {"cat": 1}}
        first = coordinator.http.post("/v1/join", json=body, headers=joined).json()["token"]
        assert coordinator.http.post("/v1/join", json=body, headers=joined).status_code == 403
        second = coordinator.admin("POST", "/v1/federations/pets/clients/left/rotate")["token"]
        assert Site(coordinator.http, PLAN, "left", first).http.get("/v1/me", headers=joined).status_code == 401
        site = Site(coordinator.http, PLAN, "left", second)
        round_id = site.task().round.id
        assert site.put(round_id, b"nonsense").status_code == 422
        assert site.put(round_id, update_body(PLAN, {})).status_code == 200
        coordinator.http.get("/v1/me", params={"token": second})  # a caller puts the token in the wrong place
        coordinator.http.post("/v1/join", json={"name": unused}, headers={"Authorization": f"Bearer {unused}"})
        output = coordinator.stop_and_read()
    assert "/v1/join" in output
    assert "DEBUG" in output
    for secret in (ADMIN_TOKEN, invite, unused, first, second):
        assert secret not in output
        assert secret[-20:] not in output  # nor part of it
