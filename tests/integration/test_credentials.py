"""Replacing and renewing tokens, and leaving, while agents run."""

import io
import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.agent_sites import App
from support.agents import AgentThread, digits_plan, enroll, write_digits
from support.api import SocketApi
from support.cutting_proxy import CuttingProxy
from support.databases import new_database
from support.tampering_proxy import Reply, TamperingProxy

from client_agent import __main__ as command_line
from client_agent.coordinator import tokens
from client_agent.coordinator.tokens import CurrentToken
from client_agent.errors import RequestRefused
from client_agent.settings import Identity, ServeOptions
from client_agent.state.folder import StateFolder
from shared.contract.plan import FederationPlan
from shared.http.client_connection import Connection

SERVE = ServeOptions(port=0)
Command = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("client_agent.coordinator.client.LONG_POLL_S", 1.0)
    monkeypatch.setattr("client_agent.coordinator.tokens._POLL_INTERVAL_S", 0.1)


@pytest.fixture(scope="module")
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SocketApi]:
    with SocketApi(new_database("sqlite", request, tmp_path_factory.mktemp("coordinator"))) as api:
        yield api


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("data"), ("0", "1"), every=20)


@pytest.fixture
def plan(api: SocketApi, request: pytest.FixtureRequest) -> FederationPlan:
    """Create a federation for one site, not yet started, named after the test."""
    plan = digits_plan("".join(filter(str.isalnum, request.node.name))[:60], rounds=1, clients=1)
    api.create(plan, start=False)
    return plan


@pytest.fixture
def state(api: SocketApi, plan: FederationPlan, data: Path, tmp_path: Path) -> StateFolder:
    return enroll(api, plan, "north", data, tmp_path, api.url)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: StateFolder) -> Command:
    """Run a command of `distrans-agent`; return its exit code and its only line of output."""

    def call(*arguments: object, stdin: str = "") -> tuple[int, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        monkeypatch.setattr("sys.argv", ["distrans-agent", *map(str, arguments), "--state", str(state.path)])
        with pytest.raises(SystemExit) as ending:
            command_line.main()
        output = capsys.readouterr()
        (line,) = (output.out + output.err).splitlines()
        return int(ending.value.code or 0), line

    return call


def rotate(api: SocketApi, plan: FederationPlan, client: str = "north") -> str:
    return str(api.admin("POST", f"/v1/federations/{plan.name}/clients/{client}/rotate")["token"])


def is_valid(api: SocketApi, token: str) -> bool:
    return api.call("GET", "/v1/me", token).status_code == 200


class TestReplacing:
    def test_a_running_agent_resumes_without_a_restart(
        self, api: SocketApi, plan: FederationPlan, state: StateFolder, data: Path, command: Command
    ) -> None:
        with AgentThread(state, serve=SERVE) as agent, App(agent, data) as app:
            agent.wait_for_line("received model 0")
            new = rotate(api, plan)
            agent.wait_for_line("ended: invalid-token: .* distrans-agent token")
            assert app.served_round() == 0
            assert command("token", stdin=new + "\n") == (0, "north now uses the new token.")
            agent.wait_for_line("the token was replaced: resuming")
            api.admin("POST", f"/v1/federations/{plan.name}/start")
            agent.wait_for_line("The federation has finished")
            app.wait_until_served(1)
            assert app.info()["agent"]["ended"] is None
        assert state.load_status().ended is None
        assert stat.S_IMODE((state.path / "identity.json").stat().st_mode) == 0o600

    def test_a_token_can_come_from_a_file(
        self, api: SocketApi, plan: FederationPlan, state: StateFolder, tmp_path: Path, command: Command
    ) -> None:
        (tmp_path / "token").write_text(rotate(api, plan) + "\n")
        before = state.identity()
        assert command("token", "--file", tmp_path / "token")[0] == 0
        after = state.identity()
        assert is_valid(api, after.token)
        assert after == before.model_copy(update={"token": after.token})

    def test_a_token_that_is_not_this_sites_changes_nothing(
        self, api: SocketApi, plan: FederationPlan, state: StateFolder, tmp_path: Path, data: Path, command: Command
    ) -> None:
        other = enroll(api, plan, "south", data, tmp_path, api.url).identity().token
        before = (state.path / "identity.json").read_bytes()
        for given, words in (
            (other, "belongs to client 'south' of federation"),
            (state.identity().token[:-4] + "0000", "does not accept this token"),
            ("an-admin-token-for-tests", "not the admin token"),
            ("", "The token is empty"),
            ("two words", "without spaces"),
            ("x" * 10_000, "too long"),
        ):
            code, said = command("token", stdin=given)
            assert (code, words in said) == (1, True), said
        code, said = command("token", "--file", tmp_path / "gone")
        assert (code, "gone cannot be read: No such file" in said) == (1, True)
        assert "Leave out --file" in command("token", "--renew", "--file", tmp_path / "x")[1]
        assert (state.path / "identity.json").read_bytes() == before

    def test_an_unreachable_coordinator_changes_nothing(self, state: StateFolder, command: Command) -> None:
        nowhere = state.identity().model_copy(update={"connection": Connection(server="http://127.0.0.1:9")})
        state.save_identity(nowhere)
        for words in (["token"], ["token", "--renew"], ["leave", "--yes"]):
            code, said = command(*words, stdin="some-token")
            assert (code, "The coordinator cannot be reached" in said) == (1, True)
        assert state.identity() == nowhere


class TestRenewing:
    def test_the_old_token_becomes_invalid_and_a_running_agent_continues(
        self, api: SocketApi, plan: FederationPlan, state: StateFolder, command: Command
    ) -> None:
        old = state.identity().token
        with AgentThread(state) as agent:
            agent.wait_for_line("received model 0")
            assert command("token", "--renew") == (0, "The token was renewed; the old one is no longer valid.")
            assert is_valid(api, state.identity().token)
            assert not is_valid(api, old)
            api.admin("POST", f"/v1/federations/{plan.name}/start")
            agent.wait()
        assert agent.ended_with is None
        assert api.show(plan.name).state == "finished"

    def test_a_crash_before_saving_leaves_the_old_token_valid(
        self, api: SocketApi, state: StateFolder, command: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old = state.identity().token

        def crash(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as broken:
            broken.setattr(StateFolder, "save_identity", crash)
            with pytest.raises(KeyboardInterrupt):
                tokens.renew_token(state)
        assert state.identity().token == old
        assert is_valid(api, old)
        assert command("token", "--renew")[0] == 0
        assert is_valid(api, state.identity().token)

    def test_a_crash_after_saving_leaves_the_new_token_valid(
        self, api: SocketApi, state: StateFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def crash(*_: object) -> None:
            raise KeyboardInterrupt

        old = state.identity().token
        monkeypatch.setattr(tokens, "_check_owner", crash)
        with pytest.raises(KeyboardInterrupt):
            tokens.renew_token(state)
        assert state.identity().token != old
        assert is_valid(api, state.identity().token)
        assert not is_valid(api, old)

    def test_a_lost_answer_does_not_lock_the_site_out(
        self, api: SocketApi, state: StateFolder, command: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old = state.identity().token
        with CuttingProxy(int(api.url.rsplit(":", 1)[1])) as proxy:
            state.save_identity(state.identity().model_copy(update={"connection": Connection(server=proxy.url)}))
            proxy.arm(b"POST /v1/me/token", "before-response")
            with monkeypatch.context() as short:
                short.setattr("client_agent.coordinator.connection._READ_S", 2.0)
                assert command("token", "--renew")[0] == 1
            assert state.identity().token == old
            assert command("token", "--renew")[0] == 0
            assert is_valid(api, state.identity().token)

    def test_the_old_token_is_not_restored_if_the_coordinator_is_too_busy_to_confirm(
        self, api: SocketApi, state: StateFolder, command: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A running agent may have used the new token, which made the old one invalid."""
        old = state.identity().token

        def refuse_after_use(_identity: Identity, token: str) -> None:
            assert is_valid(api, token)
            raise RequestRefused(429, "rate-limited", "Too many requests.")

        monkeypatch.setattr(tokens, "_check_owner", refuse_after_use)
        code, said = command("token", "--renew")
        assert (code, "renewed and saved" in said) == (0, True)
        assert is_valid(api, state.identity().token)
        assert not is_valid(api, old)

    def test_an_older_coordinator_is_named_as_the_cause(
        self, api: SocketApi, state: StateFolder, command: Command
    ) -> None:
        with TamperingProxy(api.url) as proxy:
            state.save_identity(state.identity().model_copy(update={"connection": Connection(server=proxy.url)}))
            problem = {"title": "Not Found", "status": 404, "code": "not-found", "detail": "Not Found"}
            proxy.tamper = lambda _path, _ask: Reply(404, json.dumps(problem).encode(), {})
            code, said = command("token", "--renew")
        assert (code, "runs an older release that cannot renew tokens. Nothing was changed." in said) == (1, True)


class TestLeaving:
    def test_the_model_is_still_served_after_leaving(
        self, api: SocketApi, plan: FederationPlan, state: StateFolder, data: Path, command: Command
    ) -> None:
        with AgentThread(state, serve=SERVE) as agent, App(agent, data) as app:
            agent.wait_for_line("received model 0")
            code, said = command("leave", "--yes")
            assert (code, "north has left" in said) == (0, True)
            assert "distrans-agent run serves the last one" in said
            agent.wait_for_line("ended: left")
            assert app.served_round() == 0
        (row,) = api.admin("GET", f"/v1/federations/{plan.name}/clients")
        assert row["state"] == "left"
        assert command("leave", "--yes")[0] == 0  # again
        away = Connection(server="http://127.0.0.1:9")
        state.save_identity(state.identity().model_copy(update={"connection": away, "data": "nowhere"}))
        assert command("leave")[0] == 0  # which needs neither a coordinator nor a confirmation
        with AgentThread(state, serve=SERVE) as agent, App(agent, data) as app:
            agent.wait_for_line("ended: left: This site has left the federation")
            assert app.served_round() == 0
            assert app.info()["agent"]["troubles"] == []
        with AgentThread(state) as agent:
            agent.wait()
        assert agent.ended_with is not None
        assert agent.ended_with.exit_code == 3

    def test_leaving_needs_a_confirmation(self, api: SocketApi, state: StateFolder, command: Command) -> None:
        assert command("leave") == (
            1,
            "error: Leaving cannot be undone, and there is no terminal to confirm it. Pass --yes.",
        )
        assert is_valid(api, state.identity().token)

    def test_leaving_again_after_a_lost_answer_succeeds(
        self, api: SocketApi, state: StateFolder, command: Command
    ) -> None:
        assert api.call("DELETE", "/v1/me", state.identity().token).status_code == 204
        code, said = command("leave", "--yes")
        assert (code, "north is no longer part of" in said) == (0, True)
        assert state.identity().has_left


def test_the_token_is_kept_while_its_file_cannot_be_read(state: StateFolder) -> None:
    token = CurrentToken(state, state.identity().token)
    known, file = token(), state.path / "identity.json"
    content = json.loads(file.read_bytes())
    file.write_text("half a fi")
    assert token() == known
    file.unlink()
    assert token() == known
    file.write_text(json.dumps(content | {"token": "another"}))
    assert token() == "another"
