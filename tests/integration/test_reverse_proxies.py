"""The shipped Caddy and nginx configurations in front of a real coordinator, with TLS at the proxy."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import trustme
from sqlalchemy import func, select
from support.api import SocketApi
from support.plans import small_plan, update_body
from support.reverse_proxy import PROXIES, reverse_proxy
from support.tls import trusting

from server.store.tables import Blob, Transfer

PLAN = small_plan(
    method={"name": "fedavg"},
    image={"channels": 3, "height": 64, "width": 64},  # 4 MB: several chunks
    rounds={"count": 1, "min_clients": 2},
)
# Anyone can send these headers; the proxy must replace them.
CLAIMS = {"X-Forwarded-For": "203.0.113.5", "X-Client-Certificate": "0" * 64}
SITE_ADDRESS = "127.0.0.2"  # the sites' address; the proxy has 127.0.0.1


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


def client(url: str, authority: trustme.CA, certificate: trustme.LeafCert | None = None) -> httpx.Client:
    transport = httpx.HTTPTransport(verify=trusting(authority, certificate), local_address=SITE_ADDRESS)
    return httpx.Client(base_url=url, transport=transport, timeout=120)


def pieces(api: SocketApi, body: bytes) -> Iterator[bytes]:
    """Send the second half only after the first has arrived: a buffering proxy would hang."""
    yield body[: 3 * 1024 * 1024]
    stored = select(func.max(Blob.size_bytes)).join(Transfer, Transfer.blob_id == Blob.id)
    arrived = 0
    while not arrived:
        with api.app.state.ctx.db.read() as session:
            arrived = session.execute(stored).scalar_one_or_none() or 0
    yield body[3 * 1024 * 1024 :]


@pytest.mark.parametrize(
    ("kind", "prefix"), [(kind, prefix) for kind in PROXIES for prefix in ("", "/federated")], ids=lambda value: value
)
def test_a_federation_trains_through_a_proxy(
    kind: str, prefix: str, sqlite_url: str, tmp_path: Path, authority: trustme.CA
) -> None:
    settings = {"trusted_proxies": ("127.0.0.1",), "root_path": prefix}
    with (
        SocketApi(sqlite_url, **settings) as api,
        reverse_proxy(kind, tmp_path / kind, authority.issue_cert("localhost"), [port_of(api.url)], prefix) as url,
        client(url, authority) as http,
        ThreadPoolExecutor(1) as pool,
    ):
        api.create(PLAN)
        left, right = (api.join(PLAN, name, {"cat": 1}, http=http, headers=CLAIMS) for name in ("left", "right"))
        joined = [entry for entry in api.admin("GET", "/v1/audit") if entry["action"] == "client.join"]
        assert {entry["address"] for entry in joined} == {SITE_ADDRESS}
        assert "server" not in http.get("/healthz").headers or kind == "nginx"
        assert "strict-transport-security" in http.get("/healthz").headers, "the coordinator knows that it is HTTPS"
        round_id = left.task().round.id
        body = update_body(PLAN, {}, 1)
        streamed = http.put(f"/v1/rounds/{round_id}/update", content=pieces(api, body), headers=left.headers)
        assert streamed.status_code == 200, streamed.text
        waiting = left.task(wait_s=0)
        news = pool.submit(left.task, 60, waiting.ticket)  # a long poll that the other site's upload ends
        assert right.put(round_id, body).status_code == 200
        while (task := news.result()).action != "finished":
            news = pool.submit(left.task, 60, task.ticket)
        model = left.tensors(task.model.url)
        assert model


@pytest.mark.parametrize("kind", PROXIES)
def test_the_proxy_forwards_client_certificates(
    kind: str, sqlite_url: str, tmp_path: Path, authority: trustme.CA
) -> None:
    own, others = authority.issue_cert("left@example.org"), authority.issue_cert("other@example.org")
    settings = {"trusted_proxies": ("127.0.0.1",), "client_certificate_header": "X-Client-Certificate"}
    with (
        SocketApi(sqlite_url, **settings) as api,
        reverse_proxy(
            kind, tmp_path / kind, authority.issue_cert("localhost"), [port_of(api.url)], client_ca=authority
        ) as url,
        client(url, authority, own) as http,
        client(url, authority, others) as stranger,
    ):
        api.create(PLAN)
        site = api.join(PLAN, "left", {"cat": 1}, http=http, headers=CLAIMS)
        assert http.get("/v1/me", headers=site.headers).status_code == 200
        assert stranger.get("/v1/me", headers=site.headers).json()["code"] == "wrong-certificate"
        assert api.call("GET", "/v1/me", site.token).json()["code"] == "wrong-certificate", "past the proxy"
