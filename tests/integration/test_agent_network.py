"""Joining over the network: real certificates, real TLS servers, a real proxy."""

import datetime
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from support.agents import digits_plan, write_digits
from support.api import Api
from support.databases import new_database
from support.forward_proxy import ForwardProxy
from support.tls import foreign_site, serving_tls, write_certificate

from client_agent import __main__ as command_line
from client_agent.coordinator.client import Coordinator
from client_agent.coordinator.connection import open_http
from client_agent.settings import ServeOptions
from client_agent.state.folder import StateFolder
from client_agent.web.serve import web_server
from shared.http.client_connection import Connection

DAY = datetime.timedelta(days=1)
PLAN = digits_plan(clients=1)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA(key_type=trustme.KeyType.ECDSA)


@pytest.fixture(scope="module")
def stranger() -> trustme.CA:
    return trustme.CA(key_type=trustme.KeyType.ECDSA)


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: Path) -> Path:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return tmp_path / "ca.pem"


@pytest.fixture(scope="module")
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Return a coordinator with a federation, not yet on a socket."""
    folder = tmp_path_factory.mktemp("coordinator")
    api = Api(new_database("sqlite", request, folder))
    with api.http:
        api.create(PLAN, start=False)
        yield api


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("data"), ("0", "1"), every=20)


@pytest.fixture
def join(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run `distrans-agent join`; return its output, or its error."""

    def run(server: str, *options: object, invite: str = "some-invite") -> str:
        arguments = ["join", "--server", server, "--invite", invite, "--name", "north", "--data", data]
        arguments += ["--state", tmp_path / "north", *options]
        monkeypatch.setattr("sys.argv", ["distrans-agent", *map(str, arguments)])
        with pytest.raises(SystemExit) as ending:
            command_line.main()
        output = capsys.readouterr()
        said = output.out if ending.value.code in (0, None) else output.err
        assert "Traceback" not in said
        return said

    return run


def one_line(said: str) -> str:
    """Return the only line that a failed command prints."""
    assert said.startswith("error: ")
    (line,) = said.splitlines()
    return line


class TestCoordinatorCertificates:
    def check(self, join: Callable[..., str], certificate: trustme.LeafCert, *options: object) -> str:
        with serving_tls(foreign_site, certificate) as port:
            return one_line(join(f"https://localhost:{port}", *options))

    def test_an_expired_certificate_is_explained(
        self, join: Callable[..., str], authority: trustme.CA, ca_file: Path
    ) -> None:
        now = datetime.datetime.now(datetime.UTC)
        old = authority.issue_cert("localhost", not_before=now - 3 * DAY, not_after=now - DAY)
        said = self.check(join, old, "--ca-file", ca_file)
        assert "certificate has expired" in said
        assert "Ask the operator to renew it" in said

    def test_a_certificate_that_is_not_yet_valid_is_explained(
        self, join: Callable[..., str], authority: trustme.CA, ca_file: Path
    ) -> None:
        now = datetime.datetime.now(datetime.UTC)
        early = authority.issue_cert("localhost", not_before=now + DAY, not_after=now + 3 * DAY)
        assert "Check this machine's clock" in self.check(join, early, "--ca-file", ca_file)

    def test_a_certificate_for_another_host_is_explained(
        self, join: Callable[..., str], authority: trustme.CA, ca_file: Path
    ) -> None:
        said = self.check(join, authority.issue_cert("other.example"), "--ca-file", ca_file)
        assert "certificate is for another name" in said
        assert "'localhost'" in said
        assert "--server" in said

    def test_an_unknown_authority_is_explained(self, join: Callable[..., str], authority: trustme.CA) -> None:
        said = self.check(join, authority.issue_cert("localhost"))
        assert "an authority this machine does not trust" in said
        assert "--ca-file" in said

    def test_an_authority_other_than_the_given_one_is_explained(
        self, join: Callable[..., str], stranger: trustme.CA, ca_file: Path
    ) -> None:
        said = self.check(join, stranger.issue_cert("localhost"), "--ca-file", ca_file)
        assert "an authority this machine does not trust" in said

    def test_plain_http_server_is_reported_as_not_speaking_tls(self, join: Callable[..., str], ca_file: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:

            def answer() -> None:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

            thread = threading.Thread(target=answer)
            thread.start()
            said = join(f"https://127.0.0.1:{listening.getsockname()[1]}", "--ca-file", ca_file)
            thread.join()
        assert "does not speak TLS" in one_line(said)

    def test_http_to_a_tls_server_suggests_https(self, join: Callable[..., str], authority: trustme.CA) -> None:
        with serving_tls(foreign_site, authority.issue_cert("localhost")) as port:
            said = one_line(join(f"http://localhost:{port}"))
        assert f"the server at localhost:{port} expects TLS. Use https:// in --server" in said


class TestSiteFiles:
    @pytest.fixture
    def files(self, authority: trustme.CA, stranger: trustme.CA, tmp_path: Path) -> Path:
        mine, other = authority.issue_cert("north"), stranger.issue_cert("other")
        write_certificate(mine, tmp_path)
        other.private_key_pem.write_to_path(tmp_path / "other-key.pem")
        key = serialization.load_pem_private_key(mine.private_key_pem.bytes(), None)
        locked = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
        (tmp_path / "locked-key.pem").write_bytes(locked)
        (tmp_path / "note.txt").write_text("no certificate")
        return tmp_path

    @pytest.mark.parametrize(
        ("options", "cause", "next_step"),
        [
            ({"ca_file": "gone.pem"}, "--ca-file {}/gone.pem cannot be read: No such file", "the path of a PEM file"),
            ({"ca_file": "note.txt"}, "--ca-file {}/note.txt does not contain a PEM certificate", "Ask the operator"),
            ({"ca_file": "."}, "--ca-file {} cannot be read: Is a directory", "the path of a PEM file"),
            ({"client_cert": "gone.pem"}, "--client-cert {}/gone.pem cannot be read", "the path of a PEM file"),
            ({"client_cert": "note.txt", "client_key": "key.pem"}, "are not a PEM certificate and its", "PEM files"),
            ({"client_cert": "cert.pem"}, "are not a PEM certificate and its key", "PEM files"),
            ({"client_cert": "cert.pem", "client_key": "gone.pem"}, "--client-key {}/gone.pem cannot be", "PEM file"),
            ({"client_cert": "cert.pem", "client_key": "other-key.pem"}, "do not belong together", "PEM files"),
            ({"client_cert": "cert.pem", "client_key": "locked-key.pem"}, "passphrase", "openssl pkey"),
            ({"client_key": "key.pem"}, "--client-key needs a certificate", "--client-cert"),
        ],
    )  # fmt: skip
    def test_each_unusable_file_is_explained(
        self, join: Callable[..., str], files: Path, options: dict[str, str], cause: str, next_step: str
    ) -> None:
        """Before anything is sent: nothing listens at this address."""
        given = [part for name, file in options.items() for part in (f"--{name.replace('_', '-')}", files / file)]
        said = one_line(join("https://127.0.0.1:9", *given))
        assert cause.format(files) in said
        assert next_step in said

    def test_a_running_agent_reports_the_same_error(self, files: Path) -> None:
        connection = Connection(server="https://127.0.0.1:9", ca_file=str(files / "note.txt"))
        with pytest.raises(Exception, match="does not contain a PEM certificate"):
            open_http(connection, "token")


class TestClientCertificates:
    def test_a_missing_certificate_is_reported_with_the_options_to_pass(
        self, join: Callable[..., str], authority: trustme.CA, ca_file: Path
    ) -> None:
        with serving_tls(foreign_site, authority.issue_cert("localhost"), authority) as port:
            said = one_line(join(f"https://localhost:{port}", "--ca-file", ca_file))
        assert "--client-cert and --client-key" in said

    @pytest.mark.parametrize("which", ["missing", "of an unknown authority"])
    def test_a_tls_alert_about_the_certificate_is_explained(
        self, join: Callable[..., str], authority: trustme.CA, stranger: trustme.CA, ca_file: Path, which: str
    ) -> None:
        """Servers other than uvicorn send one."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("localhost").configure_cert(context)
        authority.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
        options: list[object] = ["--ca-file", ca_file]
        if which != "missing":
            chain = ca_file.with_name("chain.pem")
            stranger.issue_cert("north").private_key_and_cert_chain_pem.write_to_path(chain)
            options += ["--client-cert", chain]
        with socket.create_server(("127.0.0.1", 0)) as listening:

            def refuse() -> None:
                accepted, _ = listening.accept()
                secured = context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
                with pytest.raises(ssl.SSLError):
                    secured.do_handshake()
                with socket.socket(fileno=secured.detach()) as connection:
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):  # otherwise the connection would be reset and the alert lost
                        pass

            thread = threading.Thread(target=refuse)
            thread.start()
            said = one_line(join(f"https://localhost:{listening.getsockname()[1]}", *options))
            thread.join()
        cause = "requires a client certificate" if which == "missing" else "rejected this site's client"
        assert cause in said
        assert "--client-cert" in said

    def test_a_site_with_a_certificate_can_join_and_run(
        self, join: Callable[..., str], api: Api, authority: trustme.CA, ca_file: Path, tmp_path: Path
    ) -> None:
        mine = authority.issue_cert("north")
        mine.private_key_and_cert_chain_pem.write_to_path(tmp_path / "chain.pem")
        invite = api.admin("POST", f"/v1/federations/{PLAN.name}/invites")["token"]
        with serving_tls(api.app, authority.issue_cert("localhost"), authority) as port:
            options = ("--ca-file", ca_file, "--client-cert", tmp_path / "chain.pem")
            assert "Joined digits as north" in join(f"https://localhost:{port}", *options, invite=invite)
            identity = StateFolder(tmp_path / "north").identity()
            with open_http(identity.connection, identity.token) as http:
                assert Coordinator(http, threading.Event()).me().name == "north"
        api.admin("POST", f"/v1/federations/{PLAN.name}/clients/north/revoke")


def test_joining_a_server_that_is_not_a_coordinator_is_explained(
    join: Callable[..., str], authority: trustme.CA, ca_file: Path
) -> None:
    with serving_tls(foreign_site, authority.issue_cert("localhost")) as port:
        said = one_line(join(f"https://localhost:{port}", "--ca-file", ca_file))
    assert "The response (HTTP 200) did not come from a coordinator" in said


class TestProxies:
    @pytest.fixture(autouse=True)
    def _only_what_the_test_sets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.upper(), raising=False)

    def test_https_goes_through_the_proxy_of_the_environment(
        self,
        join: Callable[..., str],
        api: Api,
        authority: trustme.CA,
        ca_file: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        invite = api.admin("POST", f"/v1/federations/{PLAN.name}/invites")["token"]
        with ForwardProxy() as proxy, serving_tls(api.app, authority.issue_cert("localhost")) as port:
            monkeypatch.setenv("HTTPS_PROXY", proxy.url)
            said = join(f"https://localhost:{port}", "--ca-file", ca_file, invite=invite)
            assert "Joined digits as north" in said
            assert proxy.requests == [f"CONNECT localhost:{port} HTTP/1.1"]
        api.admin("POST", f"/v1/federations/{PLAN.name}/clients/north/revoke")

    def test_plain_http_goes_through_the_proxy_of_the_environment(
        self, join: Callable[..., str], api: Api, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with ForwardProxy() as proxy, web_server(api.app, ServeOptions(port=0)) as port:
            monkeypatch.setenv("HTTP_PROXY", proxy.url)
            assert "The invite is not valid" in one_line(join(f"http://127.0.0.1:{port}"))
            assert proxy.requests == [f"GET http://127.0.0.1:{port}/v1/join HTTP/1.1"]

    def test_no_proxy_variable_bypasses_the_proxy(
        self, join: Callable[..., str], authority: trustme.CA, ca_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with ForwardProxy() as proxy, serving_tls(foreign_site, authority.issue_cert("localhost")) as port:
            monkeypatch.setenv("HTTPS_PROXY", proxy.url)
            monkeypatch.setenv("NO_PROXY", "localhost")
            assert "did not come from a coordinator" in join(f"https://localhost:{port}", "--ca-file", ca_file)
            assert proxy.requests == []

    def test_a_refusal_by_the_proxy_is_explained(
        self, join: Callable[..., str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with ForwardProxy(refusing=True) as proxy:
            monkeypatch.setenv("HTTPS_PROXY", proxy.url)
            said = one_line(join("https://coordinator.example"))
        assert "the proxy refused (403 Forbidden)" in said
        assert "HTTPS_PROXY" in said

    def test_an_unreachable_proxy_is_explained(self, join: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
        said = one_line(join("https://coordinator.example"))
        assert "Connection refused; a proxy is set in the environment" in said

    @pytest.mark.parametrize("address", ["ftp://proxy.example", "http://proxy.example:port", "socks5://proxy.example"])
    def test_unusable_proxy_url_is_reported(
        self, join: Callable[..., str], monkeypatch: pytest.MonkeyPatch, address: str
    ) -> None:
        monkeypatch.setenv("ALL_PROXY", address)
        assert "The proxy set in the environment cannot be used" in one_line(join("https://coordinator.example"))


def test_plain_http_to_another_machine_is_refused(join: Callable[..., str]) -> None:
    said = one_line(join("http://coordinator.example"))
    assert "is not encrypted" in said
    assert "--allow-insecure-http" in said
