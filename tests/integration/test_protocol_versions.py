"""Agents and coordinators of different releases: what is compatible works, the rest names the side to upgrade."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.agents import AgentThread, digits_plan, enroll, write_digits
from support.api import SocketApi, problem_of
from support.databases import new_database
from support.plans import small_plan
from support.tampering_proxy import Reply, TamperingProxy

from client_agent.coordinator.client import Coordinator
from client_agent.coordinator.connection import open_http
from client_agent.coordinator.enrollment import join_federation
from client_agent.coordinator.outcomes import error_from_response
from client_agent.errors import ProtocolMismatch
from client_agent.state.folder import StateFolder
from shared.contract import versions
from shared.contract.errors import DistransError, ForeignAnswer
from shared.contract.measurements import EvaluationReport, PairedCounts
from shared.contract.messages import TaskAnswer
from shared.http.client import request
from shared.http.client_connection import Connection

HEADER = versions.HEADER
EVALUATION = "/v1/models/0/evaluation"
SAME, NEWER = str(versions.PROTOCOL), str(versions.PROTOCOL + 1)


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
    """Return the answer of a release that does not exist yet."""
    body = json.loads(reply.body)
    change(body)
    return Reply(reply.status, json.dumps(body).encode(), {"Content-Type": "application/json", HEADER: version})


def join(url: str, invite: str, data: Path, folder: Path, name: str = "north") -> None:
    join_federation(StateFolder(folder / "agent"), Connection(server=url), invite, name, str(data))


class TestCoordinator:
    def test_sends_its_version_with_every_answer(self, api: SocketApi) -> None:
        for path in ("/healthz", "/v1/federations", "/v1/nothing"):
            assert api.call("GET", path).headers[HEADER] == str(versions.PROTOCOL)
        assert api.call("GET", "/v1/task", token=None).headers[HEADER] == str(versions.PROTOCOL)

    @pytest.mark.parametrize(
        ("version", "side"), [(str(versions.PROTOCOL + 1), "upgrade the coordinator"), ("0", "upgrade the agent")]
    )
    def test_refuses_agents_with_an_unsupported_version(
        self, api: SocketApi, invite: str, version: str, side: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        site = api.join(digits_plan(clients=1), f"site-{version}", {"0": 1})
        monkeypatch.setattr(versions, "OLDEST_AGENT", 1)
        for path, token in (("/v1/join", invite), ("/v1/me", site.token), ("/v1/task?wait=0", site.token)):
            answer = api.call("GET", path, token=token, headers={HEADER: version})
            assert problem_of(answer) == (409, "protocol-mismatch")
            assert side in answer.json()["detail"]
        assert api.call("GET", "/v1/federations", headers={HEADER: version}).status_code == 200, (
            "operators' scripts are not agents"
        )

    def test_refuses_a_malformed_version(self, api: SocketApi, invite: str) -> None:
        answer = api.call("GET", "/v1/join", token=invite, headers={HEADER: "one"})
        assert problem_of(answer) == (422, "invalid-protocol")

    def test_sends_agents_without_the_header_a_plan_they_can_read(self, api: SocketApi, invite: str) -> None:
        """They reject unknown settings; the ones left out do not concern them."""
        older = api.call("GET", "/v1/join", token=invite).json()["plan"]["rounds"]
        current = api.call("GET", "/v1/join", token=invite, headers={HEADER: "1"}).json()["plan"]["rounds"]
        assert current.keys() - older.keys() == {"absent_after_s"}
        body = {"name": "older", "class_counts": {"0": 1}}
        joined = api.call("POST", "/v1/join", token=invite, json=body)
        assert joined.status_code == 201
        assert "absent_after_s" not in joined.json()["plan"]["rounds"]

    @pytest.mark.parametrize(
        ("name", "dropout", "hidden"),
        [("plain", 0.0, {"offset_dropout", "offset_loss"}), ("new", 0.5, {"offset_loss"})],
    )
    def test_hides_settings_from_older_agents_only_if_that_changes_nothing(
        self, api: SocketApi, name: str, dropout: float, hidden: set[str]
    ) -> None:
        api.create(small_plan(name, method={"name": "distrans", "offset_dropout": dropout}), start=False)
        token = str(api.admin("POST", f"/v1/federations/{name}/invites")["token"])
        answers = [api.call("GET", "/v1/join", token=token, headers={HEADER: version}) for version in ("1", "2")]
        older, current = (answer.json()["plan"]["method"].keys() for answer in answers)
        assert current - older == hidden

    def test_takes_evaluations_of_agents_that_know_no_verdicts(self, api: SocketApi) -> None:
        site = api.join(digits_plan(clients=1), "before-verdicts", {"0": 10})
        body = {"samples": 10, "correct": 5, "loss_sum": 1.0}
        for version in ("0", "1"):
            answer = api.call("PUT", EVALUATION, token=site.token, headers={HEADER: version}, json=body)
            assert answer.status_code == 204


class TestAgent:
    def test_sends_its_version(self, api: SocketApi) -> None:
        with open_http(Connection(server=api.url)) as http:
            assert request(http, "GET", "/healthz").request.headers[HEADER] == str(versions.PROTOCOL)

    def test_names_the_side_to_upgrade_if_an_answer_is_from_another_release(
        self, api: SocketApi, invite: str, data: Path, tmp_path: Path
    ) -> None:
        with TamperingProxy(api.url) as proxy:
            proxy.tamper = lambda _path, ask: changed(
                ask(), lambda body: body["plan"]["method"].update(name="new"), NEWER
            )
            with pytest.raises(DistransError) as caught:
                join(proxy.url, invite, data, tmp_path)
            assert (
                f"The coordinator speaks protocol {NEWER}, this agent {versions.PROTOCOL}: upgrade the agent."
                in str(caught.value)
            )
            proxy.tamper = lambda _path, ask: changed(ask(), lambda body: body.pop("plan"), NEWER)
            with pytest.raises(DistransError, match="upgrade the agent"):
                join(proxy.url, invite, data, tmp_path)
            proxy.tamper = lambda _path, ask: changed(ask(), lambda body: body.pop("plan"), SAME)
            with pytest.raises(ForeignAnswer):
                join(proxy.url, invite, data, tmp_path)

    def test_sends_an_older_coordinator_only_fields_it_knows(
        self, api: SocketApi, invite: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Releases without the header reject a join with an `attempt`, and a join cannot be repeated there."""
        sent: list[dict[str, Any]] = []
        with TamperingProxy(api.url) as proxy:  # which does not forward the header
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

    @pytest.mark.parametrize("knows_verdicts", [True, False])
    def test_sends_paired_counts_only_to_coordinators_that_know_them(
        self, api: SocketApi, monkeypatch: pytest.MonkeyPatch, knows_verdicts: bool
    ) -> None:
        sent: list[dict[str, Any]] = []
        site = api.join(digits_plan(clients=1), f"paired-{knows_verdicts}".lower(), {"0": 10})
        paired = PairedCounts(samples=10, both=4, only_served=3, only_alone=1, neither=2)
        report = EvaluationReport(samples=10, correct=7, loss_sum=1.0, paired=paired, candidate="offset")
        with TamperingProxy(api.url) as proxy:  # which does not forward the header
            ask = proxy.ask

            def note(method: str, path: str, headers: Any, content: bytes) -> Reply:
                if method == "PUT":
                    sent.append(json.loads(content))
                answer = ask(method, path, headers, content)
                return Reply(answer.status, answer.body, {HEADER: SAME}) if knows_verdicts else answer

            monkeypatch.setattr(proxy, "ask", note)
            with open_http(Connection(server=proxy.url), site.token) as http:
                coordinator = Coordinator(http, threading.Event())
                coordinator.me()
                coordinator.report_evaluation(0, report)
        counts = {"samples": 10, "correct": 7, "loss_sum": 1.0, "negatives": 0, "negatives_correct": 0}
        verdict = {"paired": paired.model_dump(), "candidate": "offset"} if knows_verdicts else {}
        assert sent == [counts | {"negatives_as_own": 0} | verdict]

    def test_joins_if_only_unknown_fields_and_round_settings_were_added(
        self, api: SocketApi, invite: str, data: Path, tmp_path: Path
    ) -> None:
        def grow(body: dict[str, Any]) -> None:
            body["weather"] = "fine"
            body["plan"]["rounds"]["siesta_s"] = 60

        with TamperingProxy(api.url) as proxy:
            proxy.tamper = lambda _path, ask: changed(ask(), grow, NEWER)
            join(proxy.url, invite, data, tmp_path)
        assert StateFolder(tmp_path / "agent").identity().federation == "digits"

    def test_logs_a_mismatch_while_it_runs_and_recovers(self, api: SocketApi, data: Path, tmp_path: Path) -> None:
        with TamperingProxy(api.url) as proxy:
            state = enroll(api, digits_plan(clients=1), "runner", data, tmp_path, proxy.url)

            def tamper(path: str, ask: Any) -> Reply:
                is_task = path.startswith("/v1/task")
                return changed(ask(), lambda body: body.update(model=7), NEWER) if is_task else ask()

            proxy.tamper = tamper
            with AgentThread(state) as agent:
                agent.wait_for_line(
                    f"coordinator: The coordinator speaks protocol {NEWER}, this agent {versions.PROTOCOL}: upgrade"
                )
                proxy.tamper = lambda _path, ask: ask()
                agent.wait_for_line(f"recovered from: The coordinator speaks protocol {NEWER}")
            assert not any("did not come from a coordinator" in line for line in agent.lines)

    def test_treats_an_unknown_action_as_wait(self) -> None:
        assert TaskAnswer.model_validate({"action": "dance", "ticket": "t"}).action == "wait"

    @pytest.mark.parametrize(
        ("header", "kind"),
        [
            (None, ForeignAnswer),
            ("x", ForeignAnswer),
            ("3", ForeignAnswer),
            ("4", ProtocolMismatch),
            ("2", ProtocolMismatch),
        ],
    )
    def test_tells_another_release_from_a_server_that_is_not_a_coordinator(
        self, header: str | None, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(versions, "PROTOCOL", 3)
        found = error_from_response(httpx.Response(400, headers={} if header is None else {HEADER: header}), b"<html>")
        assert type(found) is kind
        if header == "2":
            assert "The coordinator speaks protocol 2, this agent 3: upgrade the coordinator." in str(found)
