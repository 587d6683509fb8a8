"""Agents and coordinators of different releases: what fits goes on, the rest says which side to upgrade."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.agents import AgentThread, digits_plan, enrol, write_digits
from support.api import SocketApi, new_database
from support.tampering import Reply, TamperingProxy

from client_agent.coordinator import unreadable
from client_agent.enrol import join_federation
from client_agent.errors import OtherProtocol
from client_agent.state import StateFolder
from shared import versions
from shared.http.connection import Connection
from shared.http.outgoing import request
from shared.problems import DistransError, ForeignAnswer
from shared.schemas import TaskAnswer

HEADER = versions.HEADER


@pytest.fixture(scope="module")
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SocketApi]:
    with SocketApi(new_database("sqlite", request, tmp_path_factory.mktemp("coordinator"))) as found:
        found.create(digits_plan(clients=1), start=False)
        yield found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("data"), ("0", "1"), every=20)


@pytest.fixture
def invite(api: SocketApi) -> str:
    return str(api.admin("POST", "/v1/federations/digits/invites")["token"])


def changed(reply: Reply, change: Any, version: str) -> Reply:
    """The answer of a release that does not exist yet."""
    body = json.loads(reply.body)
    change(body)
    return Reply(reply.status, json.dumps(body).encode(), {"Content-Type": "application/json", HEADER: version})


def join(url: str, invite: str, data: Path, folder: Path, name: str = "north") -> None:
    join_federation(StateFolder(folder / "agent"), Connection(server=url), invite, name, str(data))


class TestCoordinator:
    def test_says_its_version_on_every_answer(self, api: SocketApi) -> None:
        for path in ("/healthz", "/v1/federations", "/v1/nothing"):
            assert api.call("GET", path).headers[HEADER] == str(versions.PROTOCOL)
        assert api.call("GET", "/v1/task", token=None).headers[HEADER] == str(versions.PROTOCOL)

    @pytest.mark.parametrize(
        ("version", "side"), [(str(versions.PROTOCOL + 1), "upgrade the coordinator"), ("0", "upgrade the agent")]
    )
    def test_refuses_agents_that_it_does_not_serve(
        self, api: SocketApi, invite: str, version: str, side: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        site = api.join(digits_plan(clients=1), f"site-{version}", {"0": 1})
        monkeypatch.setattr(versions, "OLDEST_AGENT", 1)
        for path, token in (("/v1/join", invite), ("/v1/me", site.token), ("/v1/task?wait=0", site.token)):
            answer = api.call("GET", path, token=token, headers={HEADER: version})
            assert (answer.status_code, answer.json()["code"]) == (409, "protocol-mismatch")
            assert side in answer.json()["detail"]
        assert api.call("GET", "/v1/federations", headers={HEADER: version}).status_code == 200, "an operator's script"

    def test_refuses_what_is_not_a_version(self, api: SocketApi, invite: str) -> None:
        answer = api.call("GET", "/v1/join", token=invite, headers={HEADER: "one"})
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid-protocol")

    def test_gives_agents_before_the_header_a_plan_that_they_can_read(self, api: SocketApi, invite: str) -> None:
        """They reject settings that they do not know, and none of those left out is about their work."""
        older = api.call("GET", "/v1/join", token=invite).json()["plan"]["rounds"]
        current = api.call("GET", "/v1/join", token=invite, headers={HEADER: "1"}).json()["plan"]["rounds"]
        assert current.keys() - older.keys() == {"absent_after_s"}
        body = {"name": "older", "class_counts": {"0": 1}}
        joined = api.call("POST", "/v1/join", token=invite, json=body)
        assert joined.status_code == 201
        assert "absent_after_s" not in joined.json()["plan"]["rounds"]


class TestAgent:
    def test_sends_its_version(self, api: SocketApi) -> None:
        from client_agent.network import open_http

        with open_http(Connection(server=api.url)) as http:
            assert request(http, "GET", "/healthz").request.headers[HEADER] == str(versions.PROTOCOL)

    def test_names_the_side_to_upgrade_instead_of_a_stranger(
        self, api: SocketApi, invite: str, data: Path, tmp_path: Path
    ) -> None:
        with TamperingProxy(api.url) as proxy:
            proxy.tamper = lambda _path, ask: changed(
                ask(), lambda body: body["plan"]["method"].update(name="new"), "2"
            )
            with pytest.raises(DistransError) as caught:
                join(proxy.url, invite, data, tmp_path)
            assert "The coordinator speaks protocol 2, this agent 1: upgrade the agent." in str(caught.value)
            proxy.tamper = lambda _path, ask: changed(ask(), lambda body: body.pop("plan"), "2")
            with pytest.raises(DistransError, match="upgrade the agent"):
                join(proxy.url, invite, data, tmp_path)
            proxy.tamper = lambda _path, ask: changed(ask(), lambda body: body.pop("plan"), "1")
            with pytest.raises(ForeignAnswer):
                join(proxy.url, invite, data, tmp_path)

    def test_sends_an_older_coordinator_only_what_that_knows(
        self, api: SocketApi, invite: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Releases before the header reject a join with an `attempt`, and cannot let a site repeat one."""
        sent: list[dict[str, Any]] = []
        with TamperingProxy(api.url) as proxy:  # which passes no such header on
            ask = proxy.ask

            def note(method: str, path: str, headers: Any, content: bytes) -> Reply:
                if method == "POST":
                    sent.append(json.loads(content))
                    if len(sent) == 1:
                        return Reply(502, b"", {})
                return ask(method, path, headers, content)

            monkeypatch.setattr(proxy, "ask", note)
            with pytest.raises(DistransError) as caught:
                join(proxy.url, invite, data, tmp_path, "before-headers")
            assert "still works" not in str(caught.value)
            join(proxy.url, invite, data, tmp_path, "before-headers")
        assert all(
            body.keys() == {"name", "class_counts", "held_out_images", "agent_version", "device"} for body in sent
        )

    def test_joins_where_only_unknown_fields_and_settings_of_rounds_were_added(
        self, api: SocketApi, invite: str, data: Path, tmp_path: Path
    ) -> None:
        def grow(body: dict[str, Any]) -> None:
            body["weather"] = "fine"
            body["plan"]["rounds"]["siesta_s"] = 60

        with TamperingProxy(api.url) as proxy:
            proxy.tamper = lambda _path, ask: changed(ask(), grow, "2")
            join(proxy.url, invite, data, tmp_path)
        assert StateFolder(tmp_path / "agent").identity().federation == "digits"

    def test_says_so_in_its_log_while_it_runs_and_recovers(self, api: SocketApi, data: Path, tmp_path: Path) -> None:
        with TamperingProxy(api.url) as proxy:
            state = enrol(api, digits_plan(clients=1), "runner", data, tmp_path, proxy.url)

            def tamper(path: str, ask: Any) -> Reply:
                is_task = path.startswith("/v1/task")
                return changed(ask(), lambda body: body.update(model=7), "2") if is_task else ask()

            proxy.tamper = tamper
            with AgentThread(state) as agent:
                agent.wait_for_line("coordinator: The coordinator speaks protocol 2, this agent 1: upgrade the agent")
                proxy.tamper = lambda _path, ask: ask()
                agent.wait_for_line("recovered from: The coordinator speaks protocol 2")
            assert not any("is not a coordinator" in line for line in agent.lines)

    def test_waits_when_it_does_not_know_an_action(self) -> None:
        assert TaskAnswer.model_validate({"action": "dance", "ticket": "t"}).action == "wait"

    @pytest.mark.parametrize(
        ("header", "kind"),
        [(None, ForeignAnswer), ("x", ForeignAnswer), ("3", ForeignAnswer), ("4", OtherProtocol), ("2", OtherProtocol)],
    )
    def test_tells_releases_from_strangers(
        self, header: str | None, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import httpx

        monkeypatch.setattr(versions, "PROTOCOL", 3)
        found = unreadable(httpx.Response(200, headers={} if header is None else {HEADER: header}))
        assert type(found) is kind
        if header == "2":
            assert "The coordinator speaks protocol 2, this agent 3: upgrade the coordinator." in str(found)
