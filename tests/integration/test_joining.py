"""`distrans-agent join` against a coordinator on a real socket."""

import io
import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.agents import AgentThread, digits_plan, write_digits
from support.api import SocketApi
from support.cutting_proxy import Cut, CuttingProxy
from support.databases import new_database
from support.processes import LoggedProcess

from client_agent import __main__ as command_line
from client_agent.state.folder import StateFolder
from client_agent.state.pending_join import joining
from shared.contract.plan import FederationPlan


@pytest.fixture(autouse=True)
def _short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("client_agent.coordinator.client.LONG_POLL_S", 1.0)


@pytest.fixture(scope="module")
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SocketApi]:
    with SocketApi(new_database("sqlite", request, tmp_path_factory.mktemp("coordinator"))) as api:
        yield api


@pytest.fixture
def plan(api: SocketApi, request: pytest.FixtureRequest) -> FederationPlan:
    """Create a running federation of one round for one site, named after the test."""
    plan = digits_plan("".join(filter(str.isalnum, request.node.name))[:60], rounds=1, clients=1)
    api.create(plan)
    return plan


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_digits(tmp_path / "data", ("0", "1"), every=20)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command of `distrans-agent`; return exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["distrans-agent", *map(str, arguments)])
        with pytest.raises(SystemExit) as ending:
            command_line.main()
        output = capsys.readouterr()
        assert "Traceback" not in output.err
        return int(ending.value.code or 0), output.out, output.err

    return call


def invited(api: SocketApi, plan: FederationPlan) -> str:
    return str(api.admin("POST", f"/v1/federations/{plan.name}/invites")["token"])


def arguments(api: SocketApi, data: Path, state: Path, **changes: str) -> list[str]:
    given = {"server": api.url, "name": "north", "data": str(data), "state": str(state)} | changes
    return [word for option, value in given.items() for word in (f"--{option.replace('_', '-')}", value)]


def clients(api: SocketApi, plan: FederationPlan) -> list[str]:
    return [row["name"] for row in api.admin("GET", f"/v1/federations/{plan.name}/clients")]


class TestSkippedFiles:
    def test_run_skips_what_join_skipped(
        self, api: SocketApi, plan: FederationPlan, data: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
    ) -> None:
        """So many broken files would fail a round if they were new."""
        for file in sorted(data.glob("0/*.png"))[:2] + sorted(data.glob("1/*.png"))[:2]:
            file.write_bytes(file.read_bytes()[:60])
        (data / "unicorn").mkdir()
        command = arguments(api, data, tmp_path / "state", invite=invited(api, plan))
        code, said, _ = run("join", *command, "--skip-bad")
        assert code == 0
        assert "Skipped, now and in every run (files: 4, classes: 1)" in said
        state = StateFolder(tmp_path / "state")
        assert len(state.identity().skipped.files) == 4
        assert state.identity().skipped.classes == ("unicorn",)
        (joined,) = api.admin("GET", f"/v1/federations/{plan.name}/clients")
        with AgentThread(state) as agent:
            agent.wait()
        assert api.show(plan.name).state == "finished"
        assert state.load_status().troubles == []
        assert not [line for line in agent.lines if "skipped" in line or "image counts" in line]
        (row,) = api.admin("GET", f"/v1/federations/{plan.name}/clients")
        assert row["class_counts"] == joined["class_counts"]
        (line,) = [line for line in agent.lines if "trained on" in line]
        assert f"trained on {sum(row['class_counts'].values())} images" in line


class TestWithheldClassCounts:
    def test_are_sent_neither_by_join_nor_by_run(
        self, api: SocketApi, plan: FederationPlan, data: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
    ) -> None:
        command = arguments(api, data, tmp_path / "state", invite=invited(api, plan))
        code, said, _ = run("join", *command, "--withhold-class-counts")
        assert code == 0
        assert "These counts stay here" in said
        state = StateFolder(tmp_path / "state")
        for file in sorted(data.glob("0/*.png"))[:5]:
            file.unlink()  # so that the agent has something to report
        with AgentThread(state) as agent:
            agent.wait()
        (row,) = api.admin("GET", f"/v1/federations/{plan.name}/clients")
        assert (api.show(plan.name).state, row["class_counts"]) == ("finished", {})
        assert row["held_out_images"] == state.load_status().held_out_images

    def test_are_needed_for_weights_by_number_of_images(
        self, api: SocketApi, data: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
    ) -> None:
        plan = digits_plan("weighted", rounds=1, clients=1).model_copy(update={"averaging": "samples"})
        api.create(plan)
        command = arguments(api, data, tmp_path / "state", invite=invited(api, plan))
        code, _, said = run("join", *command, "--withhold-class-counts")
        assert (code, said) == (
            1,
            "error: This federation needs every site's class counts, because of averaging = 'samples'. "
            "Join without --withhold-class-counts, or ask the operator for another plan.\n",
        )
        assert run("join", *command)[0] == 0, "the invite was not used up"


class TestTheInviteIsNotUsedUp:
    @pytest.mark.parametrize("name", ["a b", "", "-north", "n" * 65, "nörd"])
    def test_by_an_invalid_name(self, run: Callable[..., tuple[int, str, str]], tmp_path: Path, name: str) -> None:
        """It is rejected before anything is sent: nothing listens at this address."""
        command = ["--server", "http://127.0.0.1:9", "--invite", "x", "--data", str(tmp_path), "--name", name]
        code, _, said = run("join", *command, "--state", tmp_path / "state")
        assert (code, said.count("\n")) == (1, 1)
        assert f"--name {name!r} is not a valid name. Use at most 64 letters" in said
        assert not (tmp_path / "state").exists()

    def test_by_a_state_folder_that_cannot_be_written(
        self, api: SocketApi, plan: FederationPlan, data: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
    ) -> None:
        (tmp_path / "file").touch()
        invite = invited(api, plan)
        code, _, said = run("join", *arguments(api, data, tmp_path / "file" / "state", invite=invite))
        assert (code, said.count("\n")) == (1, 1)
        assert "Not a directory. Check the path, or use another one." in said
        assert clients(api, plan) == []
        assert run("join", *arguments(api, data, tmp_path / "state", invite=invite))[0] == 0
        assert clients(api, plan) == ["north"]

    def test_by_data_that_do_not_match_the_plan(
        self, api: SocketApi, plan: FederationPlan, data: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
    ) -> None:
        (data / "unicorn").mkdir()
        code, _, said = run("join", *arguments(api, data, tmp_path / "state", invite=invited(api, plan)))
        assert code == 1
        assert "class 'unicorn' has no images" in said
        assert clients(api, plan) == []
        assert not (tmp_path / "state").exists()
        (tmp_path / "made-before").mkdir()  # such as systemd's StateDirectory, which must not be removed
        assert run("join", *arguments(api, data, tmp_path / "made-before", invite=invited(api, plan)))[0] == 1
        assert list((tmp_path / "made-before").iterdir()) == []

    def test_by_a_folder_that_holds_an_agent(
        self, api: SocketApi, plan: FederationPlan, data: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
    ) -> None:
        state = tmp_path / "state"
        assert run("join", *arguments(api, data, state, invite=invited(api, plan)))[0] == 0
        before = (state / "identity.json").read_bytes()
        invite = invited(api, plan)
        code, _, said = run("join", *arguments(api, data, state, invite=invite, name="south"))
        assert code == 1
        assert "already holds an agent" in said
        assert (state / "identity.json").read_bytes() == before
        assert run("join", *arguments(api, data, tmp_path / "other", invite=invite, name="south"))[0] == 0


class TestInterruptedJoins:
    @pytest.mark.parametrize("where", ["before-request", "before-response"])
    def test_a_killed_join_can_be_repeated(
        self, api: SocketApi, plan: FederationPlan, data: Path, tmp_path: Path, where: Cut
    ) -> None:
        with CuttingProxy(int(api.url.rsplit(":", 1)[1])) as proxy:
            state = StateFolder(tmp_path / "state")
            command = ["distrans-agent", "join", *arguments(api, data, state.path, server=proxy.url)]
            environment = {"DISTRANS_INVITE": invited(api, plan), "NO_PROXY": "*"}
            proxy.arm(b"POST /v1/join", where)
            first = LoggedProcess(command, forked=True, **environment)
            assert proxy.cut.wait(60), first.lines
            first.kill()
            assert not (state.path / "identity.json").exists()
            record = state.path / "join.json"
            assert stat.S_IMODE(record.stat().st_mode) == 0o600
            assert json.loads(record.read_bytes()).keys() == {"attempt", "server", "name"}
            second = LoggedProcess(command, forked=True, **environment)
            assert second.wait() == 0, second.lines
            assert clients(api, plan) == ["north"]
            assert not record.exists()
            with AgentThread(state) as agent:
                agent.wait()
        assert api.show(plan.name).state == "finished"

    def test_a_join_without_an_answer_reports_how_to_go_on(
        self,
        api: SocketApi,
        plan: FederationPlan,
        data: Path,
        tmp_path: Path,
        run: Callable[..., tuple[int, str, str]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("client_agent.coordinator.connection._READ_S", 2.0)
        command = arguments(api, data, tmp_path / "state", invite=invited(api, plan))
        with CuttingProxy(int(api.url.rsplit(":", 1)[1])) as proxy:
            proxy.arm(b"POST /v1/join", "before-response")
            code, _, said = run("join", *command, "--server", proxy.url)
        assert (code, said.count("\n")) == (1, 1)
        assert "The coordinator cannot be reached" in said
        assert "Then run the same command again" in said
        assert (tmp_path / "state" / "join.json").exists()
        assert run("join", *command)[0] == 0
        assert clients(api, plan) == ["north"]

    def test_a_second_join_in_the_same_folder_is_refused(
        self, api: SocketApi, plan: FederationPlan, data: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
    ) -> None:
        state = StateFolder(tmp_path / "state")
        with joining(state.path, api.url, "north"):
            code, _, said = run("join", *arguments(api, data, state.path, invite=invited(api, plan)))
        assert code == 1
        assert "Another join is under way" in said
        assert clients(api, plan) == []


class TestClassNames:
    def test_a_near_match_is_suggested_and_a_map_is_remembered(
        self, api: SocketApi, data: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
    ) -> None:
        plan = digits_plan("class-map", rounds=1, clients=1)
        plan = plan.model_copy(update={"classes": ("tumor", "benign tissue", "artifact")})
        api.create(plan)
        (data / "0").rename(data / "Tumors")
        (data / "1").rename(data / "Benign_Tissue")
        command = arguments(api, data, tmp_path / "state", invite=invited(api, plan))
        code, _, said = run("join", *command)
        assert code == 1
        assert "class 'Tumors' is not in the plan; did you mean 'tumor'?" in said
        assert "class 'Benign_Tissue' is not in the plan; did you mean 'benign tissue'?" in said
        assert said.index("--class-map FILE") < said.index("--skip-bad")
        names = tmp_path / "names.toml"
        names.write_text('Tumors = "tumor"\nBenign_Tissue = "benign tissue"\n')
        code, said, _ = run("join", *command, "--class-map", names)
        assert (code, "tumor" in said) == (0, True)
        names.unlink()
        state = StateFolder(tmp_path / "state")
        with AgentThread(state) as agent:
            agent.wait()
        assert api.show(plan.name).state == "finished"
        (row,) = api.admin("GET", f"/v1/federations/{plan.name}/clients")
        assert row["class_counts"]["tumor"] > 0 < row["class_counts"]["benign tissue"]


class TestInviteSources:
    @pytest.mark.parametrize("way", ["--invite-file", "-", "DISTRANS_INVITE", "DISTRANS_INVITE_FILE"])
    def test_every_source_of_an_invite_is_read(
        self,
        api: SocketApi,
        plan: FederationPlan,
        data: Path,
        tmp_path: Path,
        run: Callable[..., tuple[int, str, str]],
        monkeypatch: pytest.MonkeyPatch,
        way: str,
    ) -> None:
        invite = invited(api, plan)
        (tmp_path / "invite").write_text(invite + "\n")
        command = arguments(api, data, tmp_path / "state")
        if way == "-":
            monkeypatch.setattr("sys.stdin", io.StringIO(invite + "\n"))
        if way.startswith("DISTRANS"):
            monkeypatch.setenv(way, str(tmp_path / "invite") if way.endswith("FILE") else invite)
        else:
            command += ["--invite-file", "-" if way == "-" else str(tmp_path / "invite")]
        assert run("join", *command)[0] == 0
        assert clients(api, plan) == ["north"]

    def test_missing_conflicting_and_unusable_invites_are_explained(
        self, tmp_path: Path, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        command = ["--server", "http://127.0.0.1:9", "--name", "north", "--data", str(tmp_path)]
        monkeypatch.setattr("sys.stdin", io.StringIO(""))
        assert "There is no invite. Pass --invite-file FILE" in run("join", *command)[2]
        both = ["--invite", "x", "--invite-file", "y"]
        assert "--invite and --invite-file exclude each other" in run("join", *command, *both)[2]
        assert "gone cannot be read: No such file" in run("join", *command, "--invite-file", tmp_path / "gone")[2]
        assert "The invite is empty" in run("join", *command, "--invite-file", "-")[2]
        assert "contains characters that invites do not have" in run("join", *command, "--invite", "päß")[2]

    def test_data_is_a_required_option(self, run: Callable[..., tuple[int, str, str]]) -> None:
        code, _, said = run("join", "--server", "http://127.0.0.1:9", "--name", "north", "--invite", "x")
        assert code == 2
        assert "--data" in said
