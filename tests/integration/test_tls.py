"""HTTPS without a proxy: renewed certificates, and clients bound to their certificates."""

import hashlib
import logging
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
import trustme
from fastapi.testclient import TestClient
from support.api import SocketApi, open_api
from support.coordinator import Site
from support.plans import small_plan
from support.tls import trusting, write_certificate

from server.http.proxies import certificate_fingerprint
from shared.contract.errors import DistransError

PLAN = small_plan(method={"name": "fedavg"}, rounds={"count": 1, "min_clients": 1})


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def fingerprint(certificate: trustme.LeafCert) -> str:
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate.cert_chain_pems[0].bytes().decode())).hexdigest()


def served(api: SocketApi) -> str:
    """Return the fingerprint of the certificate that a new connection gets."""
    host, port = api.url.removeprefix("https://").split(":")
    pem = ssl.get_server_certificate((host, int(port)), timeout=30)
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest()


class Heard(logging.Handler):
    """An event that is set once a logger has logged these words."""

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


def test_a_renewed_certificate_is_served_without_a_restart(
    sqlite_url: str, tmp_path: Path, authority: trustme.CA
) -> None:
    old, new, unfit = (authority.issue_cert("127.0.0.1") for _ in range(3))
    tls = write_certificate(old, tmp_path)
    with (
        SocketApi(sqlite_url, tls, trusting(authority)) as api,
        Heard("shared.http.server_tls", "reloaded the certificate") as renewed,
        Heard("shared.http.server_tls", "keeping the old one") as refused,
    ):
        assert served(api) == fingerprint(old)
        unfit.private_key_pem.write_to_path(tls.key)  # an interrupted renewal
        assert refused.wait(30)
        assert served(api) == fingerprint(old)
        write_certificate(new, tmp_path)
        assert renewed.wait(30)
        assert served(api) == fingerprint(new)
        assert api.http.get("/healthz").status_code == 200


@pytest.fixture
def mutual(sqlite_url: str, tmp_path: Path, authority: trustme.CA) -> Iterator[SocketApi]:
    tls = write_certificate(authority.issue_cert("127.0.0.1"), tmp_path, authority)
    tls.check()
    operator = authority.issue_cert("operator@example.org")
    with SocketApi(sqlite_url, tls, trusting(authority, operator)) as api:
        yield api


def connection(api: SocketApi, authority: trustme.CA, client: trustme.LeafCert | None) -> httpx.Client:
    return httpx.Client(base_url=api.url, verify=trusting(authority, client), trust_env=False, timeout=60)


def test_callers_without_a_certificate_are_refused(mutual: SocketApi, authority: trustme.CA) -> None:
    stranger = trustme.CA().issue_cert("left@example.org")
    for client in (None, stranger):
        with connection(mutual, authority, client) as http, pytest.raises(httpx.TransportError):
            http.get("/healthz")


def test_a_client_is_bound_to_the_certificate_it_joined_with(mutual: SocketApi, authority: trustme.CA) -> None:
    mutual.create(PLAN)
    left, other = authority.issue_cert("left@example.org"), authority.issue_cert("other@example.org")
    with connection(mutual, authority, left) as own, connection(mutual, authority, other) as others:
        token = mutual.join(PLAN, "left", {"cat": 1}, http=own).token
        assert me(own, token).status_code == 200
        assert me(others, token).json()["code"] == "wrong-certificate"
        assert me(own, token).status_code == 200
        # A renewed certificate: the operator rotates the token, and its first use binds the new certificate.
        token = mutual.admin("POST", "/v1/federations/pets/clients/left/rotate")["token"]
        assert me(others, token).status_code == 200
        assert me(own, token).json()["code"] == "wrong-certificate"
    bound = [entry for entry in mutual.admin("GET", "/v1/audit") if entry["action"] == "client.bind"]
    assert [fingerprint(other) in entry["detail"] for entry in bound] == [True]


def me(http: httpx.Client, token: str, **headers: str) -> httpx.Response:
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    return http.get("/v1/me", headers={"Authorization": f"Bearer {token}"} | more)


def test_a_client_that_joined_without_a_certificate_keeps_working(sqlite_url: str) -> None:
    with open_api(sqlite_url) as api:
        api.create(PLAN)
        assert me(api.http, api.join(PLAN, "left", {"cat": 1}).token).status_code == 200


def test_a_trusted_proxy_may_forward_the_certificate(sqlite_url: str, authority: trustme.CA) -> None:
    left, other = authority.issue_cert("left@example.org"), authority.issue_cert("other@example.org")
    header = "X-Client-Certificate"
    with open_api(sqlite_url, trusted_proxies=("10.0.0.1",), client_certificate_header=header) as api:
        api.create(PLAN)
        proxy: httpx.Client = TestClient(api.app, client=("10.0.0.1", 1))  # type: ignore[assignment]  # as good as one
        proxy.headers[header] = fingerprint(left)
        token = api.join(PLAN, "left", {"cat": 1}, http=proxy).token
        assert me(proxy, token).status_code == 200
        assert me(proxy, token, X_Client_Certificate=fingerprint(other)).json()["code"] == "wrong-certificate"
        assert me(proxy, token, X_Client_Certificate="").json()["code"] == "wrong-certificate"
        stranger: httpx.Client = TestClient(api.app, client=("10.0.0.2", 1))  # type: ignore[assignment]
        said = me(stranger, token, X_Client_Certificate=fingerprint(left))
        assert said.json()["code"] == "wrong-certificate"  # anyone can send a header
        assert Site(api.http, PLAN, "left", token).http.get("/healthz").status_code == 200


def test_every_form_of_a_forwarded_certificate_is_understood(authority: trustme.CA) -> None:
    left = authority.issue_cert("left@example.org")
    pem = left.cert_chain_pems[0].bytes().decode()
    base64 = "".join(pem.strip().splitlines()[1:-1])
    forms = (quote(pem), base64, f":{base64}:", fingerprint(left), fingerprint(left).upper())
    assert {certificate_fingerprint(form) for form in forms} == {fingerprint(left)}


def test_unusable_client_ca_file_is_refused(tmp_path: Path, authority: trustme.CA) -> None:
    tls = write_certificate(authority.issue_cert("127.0.0.1"), tmp_path)
    (tmp_path / "text.pem").write_text("no certificate")
    for file in ("missing.pem", "text.pem"):
        with pytest.raises(DistransError, match="--tls-client-ca"):
            replace(tls, client_ca=tmp_path / file).check()
