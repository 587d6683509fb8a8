"""`distrans-server serve`: what it refuses, what a first start creates, what it logs."""

import json
import logging
import signal
import socket
import stat
import time
from pathlib import Path

import httpx
import pytest
import trustme
from support.coordinator import CoordinatorProcess
from support.databases import migrate, new_postgres_database
from support.operator_commands import CRASH_SIGNS, PETS_PLAN, Command, Refuse, Succeed
from support.plans import small_plan
from support.processes import LoggedProcess
from support.tls import write_certificate

from server.http.serve import configure_logging
from server.service.settings import find_admin_token


class TestServeRefuses:
    def test_invalid_options_are_refused(
        self, refuses: Refuse, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("DISTRANS_ADMIN_TOKEN", "an-admin-token-for-tests")
        tls = write_certificate(trustme.CA().issue_cert("127.0.0.1"), tmp_path)
        (tmp_path / "text.pem").write_text("This is not a certificate.")
        start = ("serve", "--port", "0")
        assert refuses(*start, "--tls-cert", tls.cert) == "--tls-cert and --tls-key must be used together."
        assert refuses(*start, "--log-format", "xml") == "--log-format is 'xml'; it must be text or json."
        assert (
            refuses(*start, "--log-level", "loud") == "--log-level is 'loud'; it must be debug, info, warning or error."
        )
        for words in (
            ("--tls-cert", "missing.pem", "--tls-key", tls.key),
            ("--tls-cert", "text.pem", "--tls-key", "text.pem"),
            ("--tls-cert", tls.key, "--tls-key", tls.cert),
            ("--tls-cert", tmp_path, "--tls-key", tls.key),
        ):
            message = refuses(*start, *words)
            assert "cannot be used" in message
            assert message.endswith("Pass a PEM certificate chain with --tls-cert and its key with --tls-key.")

    def test_unusable_admin_tokens_are_refused(
        self, refuses: Refuse, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("DISTRANS_ADMIN_TOKEN", "short")
        message = refuses("serve", "--port", "0")
        assert message.startswith("The admin token in DISTRANS_ADMIN_TOKEN has fewer than 16 characters.")
        assert "short" not in message
        monkeypatch.delenv("DISTRANS_ADMIN_TOKEN")
        monkeypatch.setenv("DISTRANS_ADMIN_TOKEN_FILE", str(tmp_path / "missing"))
        assert "does not exist." in refuses("serve", "--port", "0")
        monkeypatch.setenv("DISTRANS_ADMIN_TOKEN_FILE", str(tmp_path))
        assert ": Is a directory." in refuses("serve", "--port", "0")


class TestLogs:
    def test_json_logs_have_one_object_per_line(self, capsys: pytest.CaptureFixture[str], command: Command) -> None:
        """Even for an exception, whose traceback has many lines."""
        assert command  # the fixture restores logging
        configure_logging("json", "info")
        try:
            raise ValueError("several\nlines")
        except ValueError:
            logging.getLogger("server").exception("it failed: %s", "so\nthere")
        (line,) = capsys.readouterr().err.splitlines()
        logged = json.loads(line)
        assert (logged["message"], logged["levelname"], logged["request_id"]) == ("it failed: so\nthere", "ERROR", "-")
        assert "ValueError: several\nlines" in logged["exc_info"]


class TestServe:
    def test_used_port_is_reported_and_leaves_nothing_behind(self, command: Command, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            outcome = command("serve", "--port", port)
        assert (outcome.code, outcome.out) == (1, "")
        assert outcome.err.splitlines()[-1] == (
            f"error: Cannot listen on 127.0.0.1:{port}: Address already in use. "
            "Stop the program that uses the port, or choose another one with --port."
        )
        assert not any(sign in outcome.err for sign in CRASH_SIGNS)
        assert list(tmp_path.iterdir()) == []

    def test_first_start_creates_the_database_and_one_admin_token(
        self, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr("server.http.serve.serve", lambda *_: None)
        file = tmp_path / "distrans-data" / "admin-token"
        outcomes = [command("serve", "--port", "0") for _ in range(2)]
        assert [outcome.code for outcome in outcomes] == [0, 0]
        place = file.relative_to(tmp_path)
        assert outcomes[0].out == f"Created an admin token in {place}, readable by you only.\n"
        assert outcomes[1].out == ""
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        assert command("federation", "list").code == 0

    def test_restart_reuses_the_existing_database_and_token(self, succeed: Succeed, tmp_path: Path) -> None:
        data = tmp_path / "data"
        token, made = find_admin_token(data, create=True)
        assert made == data / "admin-token"
        (tmp_path / "plan.toml").write_text(PETS_PLAN)
        succeed("db", "upgrade", "--data-dir", data)
        succeed("federation", "create", "plan.toml", "--data-dir", data)
        process = LoggedProcess(["distrans-server", "serve", "--port", "0", "--data-dir", data, "--log-format", "json"])
        url = json.loads(process.wait_for_line(r'^.*"listening on .*$'))["message"].split()[-1]
        headers = {"Authorization": f"Bearer {token}", "X-Request-ID": "ticket-1"}
        with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as http:
            assert [view["name"] for view in http.get("/v1/federations").json()] == ["pets"]
        process.process.send_signal(signal.SIGINT)
        assert process.wait() == 0
        logged = [json.loads(line) for line in process.lines]
        assert {"asctime", "levelname", "name", "request_id", "message"} <= set.intersection(*map(set, logged))
        (access,) = [line for line in logged if line["request_id"] == "ticket-1"]
        assert (access["method"], access["path"], access["status"]) == ("GET", "/v1/federations", 200)
        assert not [line for line in logged if line["levelname"] in ("ERROR", "CRITICAL") or "exc_info" in line]
        assert token not in "\n".join(process.lines)
        assert made.read_text().strip() == token

    def test_two_workers_serve_tls_and_stop_cleanly(self, postgres_url: str, tmp_path: Path) -> None:
        db_url = new_postgres_database(postgres_url)
        migrate(db_url)
        authority, ca_file = trustme.CA(), tmp_path / "ca.pem"
        authority.cert_pem.write_to_path(ca_file)
        tls = write_certificate(authority.issue_cert("127.0.0.1", "localhost"), tmp_path)
        options = ("--workers", "2", "--tls-cert", str(tls.cert), "--tls-key", str(tls.key))
        coordinator = CoordinatorProcess(db_url, tmp_path / "data", *options, ca_file=str(ca_file))
        assert coordinator.url.startswith("https://")
        plan = small_plan(rounds={"min_clients": 2})
        coordinator.create(plan)
        sites = [coordinator.join(plan, name, {"cat": 1}) for name in ("north", "south")]
        assert [site.task().action for site in sites] == ["train", "train"]
        with httpx.Client(trust_env=False) as stranger, pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY"):
            stranger.get(f"{coordinator.url}/healthz")
        give_up_at = time.monotonic() + 60
        while sum("Application startup complete" in line for line in coordinator.lines) < 2:
            assert coordinator.http.get("/healthz").status_code == 200  # paces this loop
            assert time.monotonic() < give_up_at
        assert coordinator.stop() == 0
        assert len([line for line in coordinator.lines if "Started server process" in line]) == 2
        assert not [line for line in coordinator.lines if "Traceback" in line or " ERROR " in line]
