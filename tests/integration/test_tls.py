"""HTTPS without a proxy: renewed certificates, and clients that are bound to theirs."""

import hashlib
import logging
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
import trustme
from fastapi.testclient import TestClient
from support.api import Api, SocketApi, new_database, open_api
from support.coordinator import Site
from support.plans import small_plan

from server.api.proxies import certificate_fingerprint
from shared.http.tls import Tls
from shared.problems import DistransError

PLAN = small_plan(method={"name": "fedavg"}, rounds={"count": 1, "min_clients": 1})


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def db_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return new_database("sqlite", request, tmp_path)


def write(certificate: trustme.LeafCert, folder: Path) -> tuple[Path, Path]:
    """The chain and the key; the key first, as a careless renewal does it."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    certificate.private_key_pem.write_to_path(key)
    cert.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    return cert, key


def fingerprint(certificate: trustme.LeafCert) -> str:
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate.cert_chain_pems[0].bytes().decode())).hexdigest()


def trust(authority: trustme.CA, client: trustme.LeafCert | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if client is not None:
        client.configure_cert(context)
    return context


def served(api: SocketApi) -> str:
    """The fingerprint of the certificate that a new connection is shown."""
    host, port = api.url.removeprefix("https://").split(":")
    pem = ssl.get_server_certificate((host, int(port)), timeout=30)
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest()


class Heard(logging.Handler):
    """An event that is set when a logger has said something."""

    def __init__(self, logger: str, words: str) -> None:
        super().__init__()
        self._logger, self._words, self.event = logging.getLogger(logger), words, threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self._words in record.getMessage():
            self.event.set()

    def __enter__(self) -> threading.Event:
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)
        return self.event

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)


def test_a_renewed_certificate_is_served_without_a_restart(db_url: str, tmp_path: Path, authority: trustme.CA) -> None:
    old, new, unfit = (authority.issue_cert("127.0.0.1") for _ in range(3))
    cert, key = write(old, tmp_path)
    with (
        SocketApi(db_url, Tls(cert, key), trust(authority)) as api,
        Heard("shared.http.tls", "was renewed") as renewed,
        Heard("shared.http.tls", "the old one stays in use") as refused,
    ):
        assert served(api) == fingerprint(old)
        unfit.private_key_pem.write_to_path(key)  # a renewal that stopped half-way
        assert refused.wait(30)
        assert served(api) == fingerprint(old)
        write(new, tmp_path)
        assert renewed.wait(30)
        assert served(api) == fingerprint(new)
        assert api.http.get("/healthz").status_code == 200


@pytest.fixture
def mutual(db_url: str, tmp_path: Path, authority: trustme.CA) -> Iterator[SocketApi]:
    clients = tmp_path / "clients.pem"
    authority.cert_pem.write_to_path(clients)
    tls = Tls(*write(authority.issue_cert("127.0.0.1"), tmp_path), clients)
    tls.check()
    operator = authority.issue_cert("operator@example.org")
    with SocketApi(db_url, tls, trust(authority, operator)) as api:
        yield api


def connection(api: SocketApi, authority: trustme.CA, client: trustme.LeafCert | None) -> httpx.Client:
    return httpx.Client(base_url=api.url, verify=trust(authority, client), trust_env=False, timeout=60)


def test_without_a_certificate_nobody_gets_in(mutual: SocketApi, authority: trustme.CA) -> None:
    stranger = trustme.CA().issue_cert("left@example.org")
    for client in (None, stranger):
        with connection(mutual, authority, client) as http, pytest.raises(httpx.TransportError):
            http.get("/healthz")


def test_a_client_is_bound_to_the_certificate_that_it_joined_with(mutual: SocketApi, authority: trustme.CA) -> None:
    mutual.create(PLAN)
    left, other = authority.issue_cert("left@example.org"), authority.issue_cert("other@example.org")
    with connection(mutual, authority, left) as own, connection(mutual, authority, other) as others:
        token = join(mutual, own, "left")
        assert me(own, token).status_code == 200
        assert me(others, token).json()["code"] == "wrong-certificate"
        assert me(own, token).status_code == 200
        # A renewed certificate: the operator rotates, and the first one that comes with the new token counts.
        token = mutual.admin("POST", "/v1/federations/pets/clients/left/rotate")["token"]
        assert me(others, token).status_code == 200
        assert me(own, token).json()["code"] == "wrong-certificate"
    bound = [entry for entry in mutual.admin("GET", "/v1/audit") if entry["action"] == "client.bind"]
    assert [fingerprint(other) in entry["detail"] for entry in bound] == [True]


def join(api: Api, http: httpx.Client, name: str) -> str:
    invite = api.admin("POST", "/v1/federations/pets/invites")["token"]
    body = {"name": name, "class_counts": {"cat": 1}}
    answer = http.post("/v1/join", json=body, headers={"Authorization": f"Bearer {invite}"})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["token"])


def me(http: httpx.Client, token: str, **headers: str) -> httpx.Response:
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    return http.get("/v1/me", headers={"Authorization": f"Bearer {token}"} | more)


def test_a_client_that_joined_without_a_certificate_keeps_working(db_url: str) -> None:
    with open_api(db_url) as api:
        api.create(PLAN)
        assert me(api.http, join(api, api.http, "left")).status_code == 200


def test_the_certificate_that_a_trusted_proxy_has_seen(db_url: str, authority: trustme.CA) -> None:
    left, other = authority.issue_cert("left@example.org"), authority.issue_cert("other@example.org")
    header = "X-Client-Certificate"
    with open_api(db_url, trusted_proxies=("10.0.0.1",), client_certificate_header=header) as api:
        api.create(PLAN)
        proxy: httpx.Client = TestClient(api.app, client=("10.0.0.1", 1))  # type: ignore[assignment]  # as good as one
        proxy.headers[header] = fingerprint(left)
        token = join(api, proxy, "left")
        assert me(proxy, token).status_code == 200
        assert me(proxy, token, X_Client_Certificate=fingerprint(other)).json()["code"] == "wrong-certificate"
        assert me(proxy, token, X_Client_Certificate="").json()["code"] == "wrong-certificate"
        stranger: httpx.Client = TestClient(api.app, client=("10.0.0.2", 1))  # type: ignore[assignment]
        said = me(stranger, token, X_Client_Certificate=fingerprint(left))
        assert said.json()["code"] == "wrong-certificate"  # anybody can send a header
        assert Site(api.http, PLAN, "left", token).http.get("/healthz").status_code == 200


def test_how_proxies_write_a_certificate(authority: trustme.CA) -> None:
    left = authority.issue_cert("left@example.org")
    pem = left.cert_chain_pems[0].bytes().decode()
    base64 = "".join(pem.strip().splitlines()[1:-1])
    forms = (quote(pem), base64, f":{base64}:", fingerprint(left), fingerprint(left).upper())
    assert {certificate_fingerprint(form) for form in forms} == {fingerprint(left)}


def test_files_that_are_no_authorities(tmp_path: Path, authority: trustme.CA) -> None:
    cert, key = write(authority.issue_cert("127.0.0.1"), tmp_path)
    (tmp_path / "text.pem").write_text("no certificate")
    for file in ("missing.pem", "text.pem"):
        with pytest.raises(DistransError, match="--tls-client-ca"):
            Tls(cert, key, tmp_path / file).check()
