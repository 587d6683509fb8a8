"""`distrans-server` prints the same output and errors on a database and, with --server, on a running coordinator."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import trustme
from sqlalchemy import update
from support.api import SocketApi
from support.commands import Outcome, server_command
from support.coordinator import ADMIN_TOKEN, CoordinatorProcess, running
from support.databases import new_database
from support.desk import Desk
from support.processes import LoggedProcess
from support.tls import trusting, write_certificate

from server.service import client_tokens, enrollment
from server.service.context import Context
from server.store.database import Database
from server.store.tables import Client
from shared.contract.messages import JoinRequest
from shared.contract.plan import parse_plan

PLAN = """
name = "{}"
classes = ["cat", "dog"]
image = {{ channels = 1, height = 14, width = 14 }}
method = {{ name = "fedavg" }}
rounds = {{ count = 2, min_clients = 1 }}
"""
SECRETS = re.compile(r"dt[ic]_[\w-]+|\b[0-9a-f]{32}\b")
TIMES = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|\d+ s ago|\d{10}\.\d+")


def comparable(outcome: Outcome) -> Outcome:
    """Remove what differs between runs, including the width of table cells."""
    texts = (TIMES.sub("TIME", SECRETS.sub("SECRET", text)) for text in (outcome.out, outcome.err))
    return Outcome(outcome.code, *(re.sub(r" +|[━─]+", " ", text) for text in texts))


Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def db_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return new_database("sqlite", request, tmp_path_factory.mktemp("database"))


@pytest.fixture(scope="module")
def coordinator(db_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    """Run a real process on the database that the local commands open, too."""
    with running(db_url, tmp_path_factory.mktemp("data"), forked=True) as process:
        yield process


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    for name in list(os.environ):
        if name.startswith("DISTRANS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.chdir(tmp_path)

    return server_command(monkeypatch, capsys)


@pytest.fixture
def both(command: Run, coordinator: CoordinatorProcess, db_url: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Run]:
    """Return functions that run commands on the database and on the coordinator."""
    monkeypatch.setenv("DISTRANS_ADMIN_TOKEN", ADMIN_TOKEN)
    places = {"local": ("--db", db_url), "remote": ("--server", coordinator.url)}
    return {place: lambda *words, where=where: command(*words, *where) for place, where in places.items()}


def act(run: Run, ctx: Context, name: str) -> list[tuple[str, Outcome]]:
    """Do everything an operator does with a federation, mistakes included; return the outcomes."""
    found: list[tuple[str, Outcome]] = []

    def note(*words: object) -> Outcome:
        outcome = run(*words)
        shown = Outcome(outcome.code, outcome.out.replace(name, "NAME"), outcome.err.replace(name, "NAME"))
        found.append((" ".join(map(str, words[:2])), comparable(shown)))
        return outcome

    Path("plan.toml").write_text(PLAN.format(name))
    for _ in range(2):
        note("federation", "create", "plan.toml")
    note("federation", "create", "missing.toml")
    invites = [note("invite", "create", name, "--hours", 1, "--note", "north hospital").out.strip() for _ in range(2)]
    token = enrollment.join(ctx, invites[0], JoinRequest(name="north", class_counts={"cat": 3})).token
    note("invite", "revoke", name, invites[0].split("_")[1])
    note("invite", "revoke", name, invites[1].split("_")[1])
    note("invite", "revoke", name, "nothing")
    note("invite", "list", name)
    note("invite", "list", name, "--json")
    for verb in ("resume", "start", "start", "pause", "resume"):
        note("federation", verb, name)
    with ctx.db.write() as session:  # so that both clients have been silent equally long
        session.execute(update(Client).values(last_seen_at=ctx.clock()))
    Desk(ctx.db, parse_plan(PLAN.format(name)), create=False).poll(client_tokens.authenticate(ctx, token))
    note("federation", "show", name)
    note("client", "list", name)
    note("client", "list", name, "--json")
    note("client", "rotate", name, "north")
    note("client", "rotate", name, "nobody")
    note("client", "revoke", name, "north")
    note("federation", "rollback", name, "--to", 7)
    note("federation", "delete", name, "--yes")
    note("federation", "cancel", name)
    note("federation", "show", name, "--json")
    note("federation", "show", name, "--watch", "--interval", 0.1)
    note("federation", "list")
    note("federation", "list", "--json")
    note("federation", "delete", name, "--yes")
    for words in (("federation", "show"), ("federation", "start"), ("invite", "create"), ("client", "list")):
        note(*words, name)
    note("audit", "list", "--federation", name)
    note("audit", "list", "--federation", name, "--json")
    note("audit", "export", f"{name}.csv")
    return found


def test_every_command_prints_the_same_locally_and_remotely(both: dict[str, Run], db_url: str) -> None:
    db = Database(db_url)
    ctx = Context(db)
    local, remote = (act(both[place], ctx, f"{place}-pets") for place in ("local", "remote"))
    db.close()
    who = re.compile(r"operator:[\w.-]+|command line|127\.0\.0\.1|\badmin\b|\"id\": ?\d+|\bid\": \d+")
    assert len(local) == len(remote)
    for (words, here), (_, there) in zip(local, remote, strict=True):
        if words.startswith("audit"):  # the audit log shows who it was, and from where
            here, there = (Outcome(one.code, who.sub("WHO", one.out), one.err) for one in (here, there))
        assert there == here, words
    failures = [outcome.err for _, outcome in remote if outcome.code]
    assert "error: There is no federation 'NAME'. Run: distrans-server federation list\n" in failures
    assert all(text.startswith("error: ") and text.count("\n") == 1 for text in failures)
    assert Path("remote-pets.csv").read_text().count("federation.delete") == 2


class TestConnection:
    def test_tokens_come_from_files_and_never_from_the_command_line(
        self, command: Run, coordinator: CoordinatorProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        listing = ("federation", "list", "--json", "--server", coordinator.url)
        missing = command(*listing)
        assert missing.err.startswith("error: --server needs the coordinator's admin token. Set DISTRANS_ADMIN_TOKEN")
        (tmp_path / "token").write_text(ADMIN_TOKEN + "\n")
        assert command(*listing, "--admin-token-file", "token").code == 0
        assert "cannot be read: No such file" in command(*listing, "--admin-token-file", "nothing").err
        monkeypatch.setenv("DISTRANS_ADMIN_TOKEN_FILE", "token")
        monkeypatch.setenv("DISTRANS_SERVER", coordinator.url)
        assert json.loads(command("federation", "list", "--json").out) == json.loads(command(*listing).out)
        monkeypatch.setenv("DISTRANS_ADMIN_TOKEN", "not-the-admin-token-of-this-one")
        assert command(*listing).err == (
            "error: The token is not valid. Check DISTRANS_ADMIN_TOKEN, or the file in --admin-token-file.\n"
        )

    def test_unsafe_and_unreachable_servers_are_refused(self, command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DISTRANS_ADMIN_TOKEN", ADMIN_TOKEN)
        for server, words in (
            ("http://coordinator.example", "is not encrypted: anyone on the network could read the token."),
            ("coordinator.example", "is not a valid URL. Use https://host[:port]."),
            ("https://admin:secret@coordinator.example", "is not a valid URL. Use https://host[:port]."),
            ("http://[::1", "is not a valid URL. Use https://host[:port]."),
            ("https://coordinator.example:port", "is not a valid URL. Use https://host[:port]."),
            ("http://127.0.0.1:1", "The coordinator cannot be reached: "),
        ):
            outcome = command("federation", "list", "--server", server)
            assert (outcome.code, outcome.err.count("\n")) == (1, 1)
            assert words in outcome.err
        both = command("federation", "list", "--server", "https://a.example", "--db", "sqlite:///x.db")
        assert both.err.startswith("error: --server and --db cannot be combined.")

    def test_a_required_client_certificate_is_presented(
        self, command: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sqlite_url: str
    ) -> None:
        monkeypatch.setenv("DISTRANS_ADMIN_TOKEN", ADMIN_TOKEN)
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1")
        tls = write_certificate(issued, tmp_path, authority)
        with SocketApi(sqlite_url, tls=tls, verify=trusting(authority, issued)) as api:
            listing = ("federation", "list", "--json", "--server", api.url, "--ca-file", "clients.pem")
            assert "--client-cert and --client-key" in command(*listing).err
            assert command(*listing, "--client-cert", tls.cert, "--client-key", tls.key).out == "[]\n"

    def test_a_proxy_error_counts_as_an_unreachable_coordinator(
        self, command: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """--watch keeps waiting for an unreachable coordinator."""
        monkeypatch.setenv("DISTRANS_ADMIN_TOKEN", ADMIN_TOKEN)

        class Proxy(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_error(502)

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        with HTTPServer(("127.0.0.1", 0), Proxy) as proxy:
            threading.Thread(target=proxy.serve_forever, daemon=True).start()
            outcome = command("federation", "list", "--server", f"http://127.0.0.1:{proxy.server_port}")
            proxy.shutdown()
        assert outcome.err == (
            "error: The coordinator cannot be reached: a proxy responded with status 502. "
            "Check that the coordinator is running.\n"
        )

    def test_a_private_authority_is_trusted_with_ca_file(
        self, command: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sqlite_url: str
    ) -> None:
        monkeypatch.setenv("DISTRANS_ADMIN_TOKEN", ADMIN_TOKEN)
        authority = trustme.CA()
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        tls = write_certificate(authority.issue_cert("127.0.0.1"), tmp_path)
        with SocketApi(sqlite_url, tls=tls, verify=trusting(authority)) as api:
            listing = ("federation", "list", "--json", "--server", api.url)
            assert "pass its certificate with --ca-file" in command(*listing).err
            assert command(*listing, "--ca-file", "ca.pem").out == "[]\n"
            assert "does not contain a PEM certificate" in command(*listing, "--ca-file", tls.key).err
            assert "Use https:// in --server" in command(*listing[:-1], api.url.replace("https", "http")).err

    @pytest.mark.parametrize(
        "words",
        [
            ("db", "upgrade"),
            ("db", "backup", "x.db"),
            ("federation", "export", "pets", "x"),
            ("federation", "import", "x"),
            ("serve",),
        ],
        ids=" ".join,
    )
    def test_commands_that_need_the_database_refuse_server(self, command: Run, words: tuple[str, ...]) -> None:
        """The error is about --server, even if another option for it comes first."""
        server = ("--server", "https://coordinator.example")
        for options in (server, (*server, "--ca-file", "ca.pem"), ("--allow-insecure-http", *server)):
            outcome = command(*words, *options)
            assert (outcome.code, outcome.err.count("\n")) == (1, 1)
            assert "needs the coordinator's database and does not work with --server" in outcome.err

    def test_neither_the_database_nor_the_methods_are_loaded(self, coordinator: CoordinatorProcess) -> None:
        code = (
            "import sys; from server import __main__ as program; sys.argv[0] = 'distrans-server'\n"
            "try: program.main()\n"
            "except SystemExit: pass\n"
            "heavy = 'sqlalchemy', 'server.service', 'shared.learning.methods'\n"
            "print([name for name in heavy if name in sys.modules])"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, "federation", "list", "--json", "--server", coordinator.url],
            env=os.environ | {"DISTRANS_ADMIN_TOKEN": ADMIN_TOKEN, "NO_PROXY": "*"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.splitlines()[-1] == "[]"


class TestDelete:
    def test_the_name_must_be_typed_to_confirm(self, both: dict[str, Run], monkeypatch: pytest.MonkeyPatch) -> None:
        Path("plan.toml").write_text(PLAN.format("asked"))
        for run in both.values():
            run("federation", "create", "plan.toml")
            monkeypatch.setattr(sys, "stdin", io.StringIO("askde\n"))
            assert run("federation", "delete", "asked").err == "error: 'askde' is not 'asked'. Nothing was deleted.\n"
            monkeypatch.setattr(sys, "stdin", io.StringIO("asked\n"))
            outcome = run("federation", "delete", "asked")
            assert outcome.out.endswith("Deleted federation asked.\n")
            assert "its history (0 rounds) and its clients (0 active)" in outcome.out


class TestWatch:
    def test_prints_changes_until_the_end_and_waits_while_the_coordinator_is_down(
        self, db_url: str, tmp_path: Path, command: Run
    ) -> None:
        (tmp_path / "plan.toml").write_text(PLAN.format("watched"))
        with running(db_url, tmp_path / "data", forked=True) as first:
            url, port = first.url, first.url.rpartition(":")[2]
            assert command("federation", "create", "plan.toml", "--db", db_url).code == 0
            watching = LoggedProcess(
                ["distrans-server", "federation", "show", "watched", "--watch", "--interval", "0.1", "--server", url],
                forked=True,
                DISTRANS_ADMIN_TOKEN=ADMIN_TOKEN,
                NO_PROXY="*",
            )
            watching.wait_for_line("watched: created, 0 of 2 rounds, 0 clients$")
            first.admin("POST", "/v1/federations/watched/start")
            watching.wait_for_line("watched: running, 0 of 2 rounds, 0 clients$")
        watching.wait_for_line(r"The coordinator cannot be reached: .*\. Trying again\.$")
        with running(db_url, tmp_path / "data", "--port", port, forked=True) as second:
            second.admin("POST", "/v1/federations/watched/cancel")
            watching.wait_for_line("watched: cancelled, .*: cancelled by the operator$")
            assert watching.wait() == 0

    def test_refreshes_in_place_on_a_terminal(self, both: dict[str, Run], monkeypatch: pytest.MonkeyPatch) -> None:
        Path("plan.toml").write_text(PLAN.format("seen"))
        for words in (("create", "plan.toml"), ("cancel", "seen")):
            assert both["local"]("federation", *words).code == 0
        monkeypatch.setenv("TERM", "xterm")
        for run in both.values():
            monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
            shown = run("federation", "show", "seen", "--watch")
            assert shown.code == 0
            assert "seen: cancelled, 0 of 2 rounds, 0 clients" in shown.out
            assert "\x1b[1A\x1b[2K" in shown.out, "moves up and overwrites"

    def test_ends_with_ctrl_c_and_without_a_traceback(self, coordinator: CoordinatorProcess) -> None:
        coordinator.create(parse_plan(PLAN.format("endless")))
        watching = LoggedProcess(
            ["distrans-server", "federation", "show", "endless", "--watch", "--server", coordinator.url],
            forked=True,
            DISTRANS_ADMIN_TOKEN=ADMIN_TOKEN,
            NO_PROXY="*",
        )
        watching.wait_for_line("endless: running")
        watching.process.send_signal(signal.SIGINT)
        assert watching.wait() == 130
        assert len(watching.lines) == 1
