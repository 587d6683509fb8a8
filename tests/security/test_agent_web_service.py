"""Attacks on the agent's web service, on its socket: foreign pages, slow and large bodies, strangers."""

import base64
import io
import json
import selectors
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import trustme
from PIL import Image
from support.agents import AgentProcess
from support.predicting import PLAN, Service, bundle, image
from typer.testing import CliRunner

from client_agent import web_service
from client_agent.__main__ import app as command_line
from client_agent.errors import StateError
from client_agent.serving import ServingModel
from client_agent.settings import Identity, ServeOptions
from client_agent.state import StateFolder
from shared.http.connection import Connection
from shared.http.tls import Tls
from shared.problems import DistransError

PNG = image()
MIB = 1024 * 1024


class Agent(Service):
    """The web service on a socket, which `http` calls."""

    port: int

    def connect(self) -> socket.socket:
        """A connection that says nothing."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def raw(self, *lines: str, body: bytes = b"") -> socket.socket:
        """A connection that has sent this head and this much of the body."""
        connection = self.connect()
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        return connection

    def head(self, kind: str, length: int, *more: str) -> list[str]:
        """The head of a request to /predict."""
        announced = [f"Content-Type: {kind}", f"Content-Length: {length}"]
        return ["POST /predict HTTP/1.1", "Host: 127.0.0.1", *announced, *more]

    def ask(self, path: str, **headers: str) -> httpx.Response:
        """GET, or POST an image to /predict."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if path != "/predict":
            return self.http.get(path, headers=named)
        return self.http.post(path, content=PNG, headers={"content-type": "image/png"} | named)


@contextmanager
def agent(**options: Any) -> Iterator[Agent]:
    chosen = ServeOptions(port=0, **options)
    one = Agent(chosen, bundle())
    scheme, verify = ("http", True) if chosen.tls is None else ("https", False)
    with web_service.serving(one.app, chosen) as one.port, httpx.Client(verify=verify, trust_env=False) as one.http:
        one.http.base_url = f"{scheme}://127.0.0.1:{one.port}"
        yield one
    one.queue.stop()


@pytest.fixture(scope="module")
def plain() -> Iterator[Agent]:
    """An agent with the usual options."""
    with agent() as one:
        yield one


def last_answer(connection: socket.socket) -> tuple[int, Any]:
    """Status and JSON of the first answer, which must be the connection's last one."""
    with connection, HTTPResponse(connection) as answer:
        assert connection.recv(12, socket.MSG_PEEK) != b"HTTP/1.1 100", "the service asks for the body"
        answer.begin()
        assert answer.getheader("connection") == "close"
        return answer.status, json.loads(answer.read())


class TestHosts:
    """DNS rebinding: a page's own name is pointed at the agent, and the browser takes both for one site."""

    @pytest.mark.parametrize("path", ["/predict", "/info", "/metrics", "/docs", "/openapi.json", "/healthz", "/none"])
    def test_a_name_that_is_not_the_agents_gets_nothing(self, plain: Agent, path: str) -> None:
        answer = plain.ask(path, Host="evil.example")
        assert (answer.status_code, answer.json()["code"]) == (421, "unknown-host")
        assert "--allowed-host" in answer.json()["next_step"]

    @pytest.mark.parametrize(
        "host",
        ["127.0.0.1.evil.example", "localhost.evil.example", "evil@127.0.0.1", "127.0.0.1@evil.example", "127.0.0.1/",
         "evil.example:8500", "[::2]", "::1", "[127.0.0.1", "127.0.0.1:80:80", "127.0.0.1 evil", "", "10.1.2.3",
         "127.1", "2130706433", "localhost..", "."],
    )  # fmt: skip
    def test_what_only_looks_like_the_agents_name(self, plain: Agent, host: str) -> None:
        assert plain.ask("/info", Host=host).status_code == 421

    @pytest.mark.parametrize(
        "host", ["127.0.0.1", "localhost", "LocalHost:1", "localhost.", "127.8.9.1:8500", "[::1]", "[::1]:8500"]
    )
    def test_the_machine_itself(self, plain: Agent, host: str) -> None:
        assert plain.ask("/predict", Host=host).status_code == 200

    def test_without_a_host_and_with_two(self, plain: Agent) -> None:
        for lines in (
            ["GET /info HTTP/1.0"],
            ["GET /info HTTP/1.1", "Host: 127.0.0.1", "Host: evil.example", "Connection: close"],
            ["GET /info HTTP/1.1", "Host: evil.example", "Host: 127.0.0.1", "Connection: close"],
        ):
            assert last_answer(plain.raw(*lines))[0] in (400, 421)

    def test_names_that_the_operator_allows(self) -> None:
        with agent(allowed_hosts=("Agent.Hospital.example", "10.1.2.3")) as one:
            assert one.ask("/info", Host="agent.hospital.example:443").status_code == 200
            assert one.ask("/info", Host="10.1.2.3").status_code == 200
            assert one.ask("/info", Host="hospital.example").status_code == 421
            assert one.ask("/info", Host="x.agent.hospital.example").status_code == 421


class TestOrigins:
    """Pages of other sites can make a browser send requests, even if they cannot read the answers."""

    @pytest.mark.parametrize("path", ["/predict", "/info"])
    @pytest.mark.parametrize(
        "origin", ["https://evil.example", "null", "", "http://127.0.0.1:1", "http://localhost", "file://"]
    )
    def test_another_origin_is_refused(self, plain: Agent, path: str, origin: str) -> None:
        answer = plain.ask(path, Origin=origin)
        assert (answer.status_code, answer.json()["code"]) == (403, "foreign-origin")
        assert "access-control-allow-origin" not in answer.headers

    def test_so_is_its_preflight_and_what_comes_without_an_origin(self, plain: Agent) -> None:
        preflight = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
        assert plain.http.options("/predict", headers=preflight).status_code == 403
        assert plain.ask("/info", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors").status_code == 403

    def test_the_agents_own_pages_and_programs(self, plain: Agent) -> None:
        own = f"http://127.0.0.1:{plain.port}"
        assert plain.ask("/predict", Origin=own, Sec_Fetch_Site="same-origin").status_code == 200
        assert plain.ask("/info", Sec_Fetch_Site="none").status_code == 200
        # A proxy may speak HTTPS with the browser and HTTP with the agent.
        assert plain.ask("/predict", Host="localhost:1", Origin="https://localhost:1").status_code == 200

    def test_a_proxy_that_does_not_hand_on_the_host(self) -> None:
        with agent(allowed_hosts=("agent.hospital.example",)) as one:
            assert one.ask("/predict", Origin="https://agent.hospital.example").status_code == 200
            assert one.ask("/predict", Origin="https://agent.hospital.example:8443").status_code == 403


def test_every_answer_tells_browsers_to_be_careful(plain: Agent) -> None:
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

    with agent() as one:
        one.queue.model = ServingModel(broken, broken, "pets", 1, "d", None, PLAN.classes)
        answer = one.ask("/predict")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal-error")
    assert answer.json()["request_id"] == answer.headers["x-request-id"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "out of memory" in caplog.text
    assert "out of memory" not in answer.text


class TestBodies:
    def test_a_body_that_never_ends_is_cut_off(self) -> None:
        with agent(body_s=0.2) as one:
            stalled = [
                one.raw(*one.head("image/png", 1000), body=b"x"),
                one.raw(*one.head("multipart/form-data; boundary=x", 1000), body=b"--x\r\n"),
                one.raw(*one.head("application/json", 1000)),
            ]
            for connection in stalled:
                status, answer = last_answer(connection)
                assert (status, answer["code"]) == (408, "body-too-slow")
            assert one.ask("/predict").status_code == 200

    def test_slow_large_bodies_neither_fill_the_memory_nor_keep_out_others(self) -> None:
        """Twelve callers send three quarters of 1 MiB and stop; the agent may hold 2 MiB."""
        with agent(max_body_bytes=MIB, max_held_bytes=2 * MIB, body_s=600) as one, selectors.DefaultSelector() as ready:
            part = bytes(MIB * 3 // 4)
            for _ in range(12):
                connection = one.raw(*one.head("image/png", MIB), body=part)
                ready.register(connection, selectors.EVENT_READ)
            dropped = 0
            while dropped < 10:  # only two of them fit
                for key, _ in ready.select(60) or pytest.fail("bodies beyond the budget are still held"):
                    assert isinstance(key.fileobj, socket.socket)
                    ready.unregister(key.fileobj)
                    status, answer = last_answer(key.fileobj)
                    assert (status, answer["code"]) == (503, "busy")
                    dropped += 1
            for _ in range(3):
                assert one.ask("/predict").status_code == 200
            left = [key.fileobj for key in ready.get_map().values()]
            assert len(left) == 2
            for connection in left:
                assert isinstance(connection, socket.socket)
                connection.close()

    def test_what_is_held_is_given_free_however_a_request_ends(self) -> None:
        """One body fits at a time; a byte that stays counted would refuse the last one."""
        length = 64 * 1024
        with agent(max_body_bytes=length, max_held_bytes=length) as one:
            for _ in range(3):
                one.raw(*one.head("image/png", length), body=bytes(1000)).close()  # hung up
                over = one.raw("POST /predict HTTP/1.1", "Host: 127.0.0.1", "Content-Type: image/png",
                               "Transfer-Encoding: chunked", body=b"10001\r\n" + bytes(length + 1))  # fmt: skip
                assert last_answer(over)[0] == 413
                assert one.predict(b"no image").status_code == 400
                assert one.predict(bytes(length)).status_code == 400
                assert one.ask("/predict").status_code == 200

    def test_a_stranger_is_not_listened_to(self) -> None:
        """With Expect: 100-continue a caller sees whether its body is wanted: it must not be."""
        with agent(token="let-me-in") as one:
            for token in ([], ["Authorization: Bearer wrong"], ["Authorization: Basic bGV0LW1lLWlu"]):
                status, answer = last_answer(one.raw(*one.head("image/png", MIB, "Expect: 100-continue", *token)))
                assert (status, answer["code"]) == (401, "invalid-token")

    def test_a_full_queue_reads_no_body(self) -> None:
        entered, release = threading.Event(), threading.Event()

        def slow(images: torch.Tensor) -> torch.Tensor:
            entered.set()
            release.wait(60)
            return torch.zeros(len(images), len(PLAN.classes))

        with agent(queue=1) as one:
            one.queue.model = ServingModel(slow, slow, "pets", 1, "d", None, PLAN.classes)
            first = one.queue.submit(lambda: torch.zeros(1, 1, 16, 16))
            assert entered.wait(60)
            status, answer = last_answer(one.raw(*one.head("image/png", MIB, "Expect: 100-continue")))
            assert (status, answer["code"]) == (429, "queue-full")
            release.set()
            first.result(60)
            assert one.ask("/predict").status_code == 200

    @pytest.mark.parametrize(
        ("lines", "expected"),
        [
            (["POST /nothing HTTP/1.1"], 404),
            (["GET /info HTTP/1.1"], 200),
            (["PUT /predict HTTP/1.1"], 405),
            (["POST /predict?top_k=0 HTTP/1.1", "Content-Type: image/png"], 422),
            (["POST /predict HTTP/1.1", "Content-Type: text/html"], 415),
            (["POST /predict HTTP/1.1", "Content-Type: image/png", "Origin: null"], 403),
        ],
    )
    def test_a_body_that_nobody_reads_ends_the_connection(self, plain: Agent, lines: list[str], expected: int) -> None:
        for length in ("Content-Length: 100000", "Transfer-Encoding: chunked"):
            assert last_answer(plain.raw(*lines, "Host: 127.0.0.1", length))[0] == expected


def test_one_address_cannot_take_all_connections() -> None:
    with agent(max_connections=8) as one, ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(one.connect()).sendall(b"GET /in")
        with one.connect() as fifth, suppress(ConnectionError):
            assert fifth.recv(100) == b""
        with pytest.raises(httpx.TransportError):
            one.ask("/info")
        elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")
        with httpx.Client(transport=elsewhere, base_url=one.http.base_url) as other:
            assert other.get("/info").status_code == 200


def test_connections_that_never_finish_their_tls_handshake_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = write(trustme.CA().issue_cert("127.0.0.1"), tmp_path)
    with agent(tls=tls, max_connections=8) as one, ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(one.connect())
        with one.connect() as fifth, suppress(ConnectionError):
            assert fifth.recv(100) == b""
        assert "refused a connection from 127.0.0.1: 4 connections are open from there" in caplog.text
        elsewhere = httpx.HTTPTransport(local_address="127.0.0.2", verify=False)
        with httpx.Client(transport=elsewhere, base_url=one.http.base_url) as other:
            assert other.get("/info").status_code == 200


def test_silent_tls_connections_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.http.listener._TLS_HELLO_S", 0.1)
    tls = write(trustme.CA().issue_cert("127.0.0.1"), tmp_path)
    with agent(tls=tls) as one, one.connect() as silent, suppress(ConnectionError):
        assert silent.recv(100) == b""


@pytest.mark.parametrize("has_tls", [False, True])
def test_the_health_check_of_the_container_knows_both_schemes(has_tls: bool, tmp_path: Path) -> None:
    dockerfile = (Path(__file__).parents[2] / "Dockerfile").read_text().partition("AS agent")[2]
    check = json.loads(dockerfile.partition("    CMD ")[2].partition("\n")[0])
    tls = write(trustme.CA().issue_cert("127.0.0.1"), tmp_path) if has_tls else None
    with agent(tls=tls) as one:
        command = [part.replace("8500", str(one.port)) for part in check[1:]]
        assert subprocess.run([sys.executable, *command], check=False).returncode == 0
    assert subprocess.run([sys.executable, *command], check=False, stderr=subprocess.DEVNULL).returncode != 0


def bomb(width: int, height: int) -> bytes:
    """A small PNG whose header claims many pixels and whose pixels cannot be decoded."""
    buffer = io.BytesIO()
    Image.new("L", (width, height)).save(buffer, "PNG")
    data = bytearray(buffer.getvalue())
    start = data.index(b"IDAT") + 4
    data[start : start + 20] = bytes(20)
    return bytes(data)


def write(certificate: trustme.LeafCert, folder: Path) -> Tls:
    tls = Tls(folder / "cert.pem", folder / "key.pem")
    certificate.private_key_pem.write_to_path(tls.key)
    tls.cert.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    return tls


class TestImages:
    def test_pixels_are_counted_before_any_is_decoded(self, plain: Agent) -> None:
        files = [("images", (f"{n}.png", bomb(2000, 1000))) for n in range(26)]
        answer = plain.http.post("/predict", files=files)
        assert (answer.status_code, answer.json()["code"]) == (413, "too-many-pixels")
        assert "26 images have 52000000 pixels" in answer.json()["detail"]
        assert "50000000" in answer.json()["detail"]
        texts = [base64.b64encode(data).decode() for _, (_, data) in files]
        assert plain.http.post("/predict", json={"images": texts}).json()["detail"] == answer.json()["detail"]
        assert plain.http.post("/predict", files=files[:25]).status_code == 400  # few enough to look at the pixels

    def test_images_are_counted_before_any_is_decoded(self, plain: Agent) -> None:
        for count in (33, 100_000):
            answer = plain.http.post("/predict", json={"images": ["?"] * count})
            assert (answer.status_code, answer.json()["code"]) == (422, "image-count")

    def test_a_form_with_too_many_files_is_refused_at_the_first_one_too_many(self, plain: Agent) -> None:
        part = b'--x\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n\r\nx\r\n'
        connection = plain.raw(*plain.head("multipart/form-data; boundary=x", MIB), body=part * 33)
        status, answer = last_answer(connection)
        assert (status, answer["code"]) == (422, "image-count")

    def test_uploaded_images_are_never_written_to_a_disk(
        self, plain: Agent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Files over 1 MB would be, into the folder for temporary files, which is not there."""
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
        large = image(size=(1200, 1200))
        assert len(large) > MIB
        assert plain.http.post("/predict", files={"images": large}).status_code == 200


class TestExposure:
    """What `distrans-agent run` refuses to open to a network."""

    def test_every_caller_of_an_agent_with_tls_is_told_to_stay_with_it(self, tmp_path: Path) -> None:
        tls = write(trustme.CA().issue_cert("127.0.0.1"), tmp_path)
        with agent(tls=tls) as one:
            answer = one.ask("/predict")
            assert (answer.status_code, answer.headers["strict-transport-security"]) == (200, "max-age=31536000")
            own = f"127.0.0.1:{one.port}"
            assert one.ask("/predict", Origin=f"https://{own}").status_code == 200
            assert one.ask("/predict", Origin=f"http://{own}").status_code == 403
            with one.raw("GET /info HTTP/1.1", "Host: 127.0.0.1") as plain_text:
                assert not plain_text.recv(100).startswith(b"HTTP")

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "agent.hospital.example"])  # noqa: S104 - refused
    def test_without_a_token_only_this_machine_is_served(self, host: str, tmp_path: Path) -> None:
        run = ["run", "--state", str(tmp_path), "--host", host]
        refusal = " ".join(CliRunner().invoke(command_line, run).exception.args)  # type: ignore[union-attr]
        assert f"--host {host} opens /predict to the network, and no token protects it." in refusal
        assert "DISTRANS_PREDICT_TOKEN" in refusal
        (tmp_path / "token").write_text("let-me-in\n")
        from_file = ["--predict-token-file", str(tmp_path / "token")]
        for allowed in (["--allow-open-predict"], ["--predict-token", "let-me-in"], from_file, ["--no-serve"]):
            result = CliRunner().invoke(command_line, [*run, *allowed])
            assert isinstance(result.exception, StateError), "it went on to look for its folder"

    def test_the_operator_is_warned(self) -> None:
        token = "let-me-in"
        tls = Tls(Path("cert.pem"), Path("key.pem"))
        assert ServeOptions(host="127.0.0.1").risks() == []
        assert ServeOptions(host="192.0.2.7", token=token, tls=tls).risks() == []
        (open_to_all,) = ServeOptions(host="192.0.2.7", tls=tls).risks()
        assert "has no token" in open_to_all
        (in_the_clear,) = ServeOptions(host="192.0.2.7", token=token).risks()
        assert "not encrypted" in in_the_clear

    @pytest.mark.parametrize(
        ("option", "words"),
        [
            (["--predict-token", ""], "token is empty"),
            (["--predict-token", "päßwort"], "an HTTP header cannot hold"),
            (["--predict-token-file", "missing"], "missing cannot be read: No such file"),
            (["--predict-token-file", "missing", "--predict-token", "x"], "two ways to give the same token"),
            (["--allowed-host", "https://agent.example"], "is not a host name"),
            (["--allowed-host", "agent.example:443"], "is not a host name"),
            (["--allowed-host", "good.example,*"], "'*' is not a host name"),
            (["--tls-cert", "cert.pem"], "--tls-cert and --tls-key go together"),
            (["--tls-cert", "missing.pem", "--tls-key", "missing.pem"], "missing.pem and missing.pem cannot be used"),
        ],
    )
    def test_options_that_would_not_protect(self, option: list[str], words: str, tmp_path: Path) -> None:
        result = CliRunner().invoke(command_line, ["run", "--state", str(tmp_path), *option])
        assert isinstance(result.exception, DistransError)
        assert words in str(result.exception)

    def test_the_program_takes_token_hosts_and_certificate(self, tmp_path: Path) -> None:
        """As a process of its own, with the token in a file, as in a container."""
        state = StateFolder(tmp_path / "state")
        coordinator = Connection(server="http://127.0.0.1:9")
        who = {"client_id": "1", "name": "north", "token": "t", "federation": "pets", "data": "sklearn:digits"}
        state.create(Identity(plan=PLAN, connection=coordinator, **who))
        (tmp_path / "token").write_text("from-a-file\n")
        authority = trustme.CA()
        tls = write(authority.issue_cert("127.0.0.1"), tmp_path)
        trust = ssl.create_default_context()
        authority.configure_trust(trust)
        names = {"DISTRANS_AGENT_ALLOWED_HOSTS": "one.example, two.example"}
        options = ["--no-train", "--tls-cert", str(tls.cert), "--tls-key", str(tls.key)]
        process = AgentProcess(state, *options, DISTRANS_PREDICT_TOKEN_FILE=str(tmp_path / "token"), **names)
        try:
            url = process.predict_url()
            assert url.startswith("https://127.0.0.1:")
            with httpx.Client(base_url=url, verify=trust, trust_env=False) as http:
                assert http.get("/info").status_code == 401
                http.headers["Authorization"] = "Bearer from-a-file"
                for host, status in {"two.example": 200, "three.example": 421}.items():
                    assert http.get("/info", headers={"Host": host}).status_code == status
        finally:
            process.stop()
