"""What an agent exposes to a network, and what `distrans-agent run` refuses to expose."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import trustme
from support.agent_service import PLAN
from support.agents import AgentProcess
from support.tls import trusting, write_certificate
from support.web_agents import web_agent
from typer.testing import CliRunner

from client_agent.__main__ import app as command_line
from client_agent.errors import StateError
from client_agent.settings import Identity, ServeOptions
from client_agent.state.folder import StateFolder
from shared.contract.errors import DistransError
from shared.http.client_connection import Connection
from shared.http.server_tls import Tls


@pytest.mark.parametrize("has_tls", [False, True])
def test_the_container_health_check_works_with_and_without_tls(has_tls: bool, tmp_path: Path) -> None:
    dockerfile = (Path(__file__).parents[2] / "Dockerfile").read_text().partition("AS agent")[2]
    check = json.loads(dockerfile.partition("    CMD ")[2].partition("\n")[0])
    tls = write_certificate(trustme.CA().issue_cert("127.0.0.1"), tmp_path) if has_tls else None
    with web_agent(tls=tls) as one:
        command = [part.replace("8500", str(one.port)) for part in check[1:]]
        assert subprocess.run([sys.executable, *command], check=False).returncode == 0
    assert subprocess.run([sys.executable, *command], check=False, stderr=subprocess.DEVNULL).returncode != 0


def test_an_agent_with_tls_tells_browsers_to_insist_on_it(tmp_path: Path) -> None:
    tls = write_certificate(trustme.CA().issue_cert("127.0.0.1"), tmp_path)
    with web_agent(tls=tls) as one:
        answer = one.ask("/predict")
        assert (answer.status_code, answer.headers["strict-transport-security"]) == (200, "max-age=31536000")
        own = f"127.0.0.1:{one.port}"
        assert one.ask("/predict", Origin=f"https://{own}").status_code == 200
        assert one.ask("/predict", Origin=f"http://{own}").status_code == 403
        with one.raw("GET /info HTTP/1.1", "Host: 127.0.0.1") as plain_text:
            assert not plain_text.recv(100).startswith(b"HTTP")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "agent.hospital.example"])  # noqa: S104 - refused
def test_an_agent_without_a_token_serves_only_its_own_machine(host: str, tmp_path: Path) -> None:
    run = ["run", "--state", str(tmp_path), "--host", host]
    refusal = " ".join(CliRunner().invoke(command_line, run).exception.args)  # type: ignore[union-attr]
    assert f"--host {host} opens /predict to the network without a token." in refusal
    assert "DISTRANS_PREDICT_TOKEN" in refusal
    (tmp_path / "token").write_text("let-me-in\n")
    from_file = ["--predict-token-file", str(tmp_path / "token")]
    for allowed in (["--allow-open-predict"], ["--predict-token", "let-me-in"], from_file, ["--no-serve"]):
        result = CliRunner().invoke(command_line, [*run, *allowed])
        assert isinstance(result.exception, StateError), "it should go on to look for its folder"


def test_the_operator_is_warned_about_a_missing_token_or_encryption() -> None:
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
        (
            ["--predict-token-file", "missing", "--predict-token", "x"],
            "--predict-token and --predict-token-file exclude each other",
        ),
        (["--allowed-host", "https://agent.example"], "is not a host name"),
        (["--allowed-host", "agent.example:443"], "is not a host name"),
        (["--allowed-host", "good.example,*"], "'*' is not a host name"),
        (["--tls-cert", "cert.pem"], "--tls-cert and --tls-key must be used together"),
        (["--tls-cert", "missing.pem", "--tls-key", "missing.pem"], "missing.pem and missing.pem cannot be used"),
    ],
)
def test_options_that_would_not_protect_are_refused(option: list[str], words: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(command_line, ["run", "--state", str(tmp_path), *option])
    assert isinstance(result.exception, DistransError)
    assert words in str(result.exception)


def test_the_program_applies_token_hosts_and_certificate(tmp_path: Path) -> None:
    """As a separate process with the token in a file, as in a container."""
    state = StateFolder(tmp_path / "state")
    coordinator = Connection(server="http://127.0.0.1:9")
    who = {"client_id": "1", "name": "north", "token": "t", "federation": "pets", "data": "sklearn:digits"}
    state.create(Identity(plan=PLAN, connection=coordinator, **who))
    (tmp_path / "token").write_text("from-a-file\n")
    authority = trustme.CA()
    tls = write_certificate(authority.issue_cert("127.0.0.1"), tmp_path)
    names = {"DISTRANS_AGENT_ALLOWED_HOSTS": "one.example, two.example"}
    options = ["--no-train", "--tls-cert", str(tls.cert), "--tls-key", str(tls.key)]
    process = AgentProcess(state, *options, DISTRANS_PREDICT_TOKEN_FILE=str(tmp_path / "token"), **names)
    try:
        url = process.predict_url()
        assert url.startswith("https://127.0.0.1:")
        with httpx.Client(base_url=url, verify=trusting(authority), trust_env=False) as http:
            assert http.get("/info").status_code == 401
            http.headers["Authorization"] = "Bearer from-a-file"
            for host, status in {"two.example": 200, "three.example": 421}.items():
                assert http.get("/info", headers={"Host": host}).status_code == status
    finally:
        process.stop()
