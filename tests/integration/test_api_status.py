"""PUT /v1/me/status: what agents may report, and who can read it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.agents import AgentThread, digits_plan, enroll, write_digits
from support.api import Api, SocketApi, open_api
from support.coordinator import Site
from support.databases import new_database
from support.plans import small_plan
from support.waiting import eventually

from client_agent.progress import TrainingDisplay
from client_agent.settings import ServeOptions
from shared.contract.messages import ClientView
from shared.learning.methods.base import BatchProgress

PLAN = small_plan("pets", method={"name": "fedavg"}, rounds={"min_clients": 9})
REPORT = {"activity": "training", "detail": "training round 1", "troubles": [{"kind": "data", "message": "Gone."}]}


@pytest.fixture(scope="module")
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with open_api(new_database("sqlite", request, tmp_path_factory.mktemp("coordinator"))) as found:
        found.create(PLAN)
        yield found


@pytest.fixture(scope="module")
def north(api: Api) -> Site:
    return api.join(PLAN, "north", {"cat": 1})


@pytest.fixture(scope="module")
def south(api: Api) -> Site:
    return api.join(PLAN, "south", {"cat": 1})


def seen_by(api: Api, token: str | None = None, plan: str = "pets") -> dict[str, ClientView]:
    options = {} if token is None else {"token": token}
    rows = api.call("GET", f"/v1/federations/{plan}/clients", **options).json()
    return {row["name"]: ClientView.model_validate(row) for row in rows}


def test_only_the_operator_and_the_client_itself_see_a_report(api: Api, north: Site, south: Site) -> None:
    assert seen_by(api)["south"].status_at is None
    assert api.call("PUT", "/v1/me/status", token=north.token, json=REPORT).status_code == 204
    eventually(lambda: seen_by(api)["north"].activity == "training")
    shown = seen_by(api)["north"]
    assert (shown.activity_detail, shown.troubles[0].message) == ("training round 1", "Gone.")
    assert shown.status_at is not None
    assert seen_by(api, north.token)["north"] == shown
    assert seen_by(api, south.token).keys() == {"south"}
    for path in ("/v1/federations/pets", "/v1/federations/pets/rounds", "/v1/task?wait=0", "/v1/me"):
        assert "Gone." not in api.call("GET", path, token=south.token).text


def test_a_poll_by_an_older_agent_clears_the_report(api: Api, south: Site) -> None:
    assert api.call("PUT", "/v1/me/status", token=south.token, json=REPORT).status_code == 204
    eventually(lambda: seen_by(api)["south"].status_at is not None)
    assert api.call("GET", "/v1/task?wait=0", token=south.token).status_code == 200
    eventually(lambda: seen_by(api)["south"].status_at is None)
    assert seen_by(api)["south"].troubles == []


def test_control_characters_do_not_reach_a_terminal(api: Api, north: Site) -> None:
    nasty = REPORT | {"detail": "a\x1b[2Jb\nc\u202ed\x00"}
    assert api.call("PUT", "/v1/me/status", token=north.token, json=nasty).status_code == 204
    eventually(lambda: seen_by(api)["north"].activity_detail == "a [2Jb c d ")


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"weather": "fine"}, 204),  # from a newer agent
        ({"activity": "dancing"}, 422),
        ({"detail": "x" * 201}, 422),
        ({"troubles": [{"kind": "k" * 65, "message": ""}]}, 422),
        ({"troubles": [{"kind": "k", "message": "x" * 301}]}, 422),
        ({"troubles": [{"kind": "k", "message": "x"}] * 9}, 422),
        ({"detail": 7}, 422),
    ],
)
def test_values_that_are_too_long_or_unknown_are_refused(
    api: Api, north: Site, change: dict[str, Any], status: int
) -> None:
    answer = api.call("PUT", "/v1/me/status", token=north.token, json=REPORT | change)
    assert answer.status_code == status, answer.text


def test_only_a_client_may_report(api: Api) -> None:
    assert api.call("PUT", "/v1/me/status", json=REPORT).json()["code"] == "client-only"
    assert api.call("PUT", "/v1/me/status", token=None, json=REPORT).json()["code"] == "no-token"


def test_the_operator_sees_an_agents_trouble(sqlite_url: str, tmp_path: Path) -> None:
    """The agent cannot open its images."""
    plan = digits_plan(clients=1, rounds=1)
    data = write_digits(tmp_path / "data", ("0", "1"), every=20)
    with SocketApi(sqlite_url) as api:
        api.create(plan, start=False)
        state = enroll(api, plan, "north", data, tmp_path, api.url)
        data.rename(tmp_path / "elsewhere")
        with AgentThread(state, serve=ServeOptions(port=0)):
            eventually(lambda: bool(seen_by(api, plan=plan.name)["north"].troubles))
            (trouble,) = seen_by(api, plan=plan.name)["north"].troubles
            assert trouble.kind == "data"
            assert str(tmp_path) not in trouble.message, "names of files stay at the site"
        eventually(lambda: seen_by(api, plan=plan.name)["north"].activity == "ended")
        api.admin("POST", f"/v1/federations/{plan.name}/cancel")  # ends the long poll that was cut off


def test_an_agent_that_cannot_train_does_not_report_a_download(sqlite_url: str, tmp_path: Path) -> None:
    """It has downloaded the round's model and pauses until its images are back."""
    plan = digits_plan(clients=1, rounds=1)
    data = write_digits(tmp_path / "data", ("0", "1"), every=20)
    with SocketApi(sqlite_url) as api:
        api.create(plan)
        state = enroll(api, plan, "north", data, tmp_path, api.url)
        data.rename(tmp_path / "elsewhere")
        with AgentThread(state, serve=ServeOptions(port=0)):
            eventually(lambda: seen_by(api, plan=plan.name)["north"].activity_detail == "waiting to try again")
            assert seen_by(api, plan=plan.name)["north"].activity == "waiting"


def test_an_agent_reports_while_it_trains(sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its training is blocked until the coordinator shows what it is doing."""
    plan = digits_plan(clients=1, rounds=1)
    with SocketApi(sqlite_url) as api:
        api.create(plan)
        state = enroll(api, plan, "north", write_digits(tmp_path / "data", ("0", "1"), every=20), tmp_path, api.url)

        def shown() -> str:
            return seen_by(api, plan=plan.name)["north"].activity_detail

        update = TrainingDisplay.update

        def held_up(display: TrainingDisplay, progress: BatchProgress) -> None:
            eventually(lambda: shown() == "training round 1")
            update(display, progress)

        monkeypatch.setattr(TrainingDisplay, "update", held_up)
        with AgentThread(state) as agent:
            agent.wait()
        assert (agent.ended_with, api.show(plan.name).state) == (None, "finished")
        assert seen_by(api, plan=plan.name)["north"].troubles == []
