"""A client learns nothing about other clients, with any call it can make, in any state of its federation."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sqlalchemy import update
from support.api import Api, open_api
from support.coordinator import Site
from support.desk import MEAN_OFFSETS, make_overdue
from support.plans import small_plan, update_body

from server.service.deadlines import enforce_deadlines
from server.store.tables import Round, Transfer

PLAN = small_plan(method=MEAN_OFFSETS, rounds={"count": 4, "min_clients": 4, "deadline_s": 3600, "quorum": 1.0})
OTHERS = ("secret-east", "secret-south", "secret-west")
# Calls a client token cannot make at all.
REFUSED = {"/metrics": 401, "/v1/join": 401, "/v1/audit": 403, "/v1/federations/{name}/invites": 403}
MEASURED = {"samples": 10, "correct": 7, "loss_sum": 3.0}


class Scene:
    """One client that asks, and three others whose names and ids it must never see."""

    def __init__(self, api: Api) -> None:
        self.api = api
        api.create(PLAN)
        self.north = api.join(PLAN, "north", {"cat": 2})
        self.others = [api.join(PLAN, name, {"cat": 1, "dog": 3}) for name in OTHERS]
        ids = {view["name"]: view["id"] for view in api.admin("GET", f"/v1/federations/{PLAN.name}/clients")}
        self.secrets = [*OTHERS, *(ids[name] for name in OTHERS)]

    @property
    def round_id(self) -> int:
        return int(self.api.admin("GET", f"/v1/federations/{PLAN.name}/rounds")[-1]["id"])

    def upload(self, site: Site) -> httpx.Response:
        round_ = self.api.admin("GET", f"/v1/federations/{PLAN.name}/rounds")[-1]
        return site.put(round_["id"], update_body(PLAN, round_["facts"]))

    def walk(self) -> dict[str, int]:
        """Make every documented GET call as north and check the responses; return the statuses by path."""
        model = self.api.show(PLAN.name).latest_model
        queries = {"/v1/federations/{name}/personal": f"?model={model}", "/v1/task": "?wait=0"}
        statuses = {}
        for path, operations in self.api.app.openapi()["paths"].items():
            if "get" in operations:
                address = path.format(name=PLAN.name, round_id=self.round_id) + queries.get(path, "")
                statuses[path] = self.checked("GET", address).status_code
        return statuses

    def checked(self, method: str, path: str, **options: Any) -> httpx.Response:
        answer = self.api.call(method, path, self.north.token, **options)
        whole = answer.content + repr(answer.headers).encode()
        assert [secret for secret in self.secrets if secret.encode() in whole] == [], (path, whole)
        return answer

    def let_the_deadline_pass(self) -> None:
        make_overdue(self.api.app.state.ctx.db)
        enforce_deadlines(self.api.app.state.ctx)


@pytest.fixture
def scene(sqlite_url: str) -> Iterator[Scene]:
    with open_api(sqlite_url) as api:
        yield Scene(api)


def test_clients_never_read_names_of_others_in_any_state(scene: Scene) -> None:
    """In each state the admin reads names, and the client only numbers."""
    api, base = scene.api, f"/v1/federations/{PLAN.name}"
    statuses = scene.walk()
    assert {path: status for path, status in statuses.items() if status != 200} == REFUSED
    assert len(statuses) > 15

    assert scene.upload(scene.north).status_code == 200
    assert scene.checked("GET", "/v1/task?wait=0").json()["reason"] == (
        "waiting for 3 of 4 clients to connect; deadline in 7 days"
    )
    assert "to connect: secret-east, secret-south, secret-west" in str(api.show(PLAN.name).waiting_for)
    for site in scene.others:
        site.task(0)
    api.app.state.heartbeats.flush(api.app.state.ctx)
    task = scene.checked("GET", "/v1/task?wait=0").json()
    assert (task["action"], task["reason"]) == ("wait", "waiting for 3 of 4 clients; deadline in 60 min")
    assert "secret-east, secret-south, secret-west" in str(api.show(PLAN.name).waiting_for)
    scene.walk()

    whole = update_body(PLAN, api.admin("GET", f"{base}/rounds")[-1]["facts"])
    assert scene.others[0].patch(scene.round_id, whole[:100], 0, whole).status_code == 204
    scene.let_the_deadline_pass()
    task = scene.checked("GET", "/v1/task?wait=0").json()
    assert task["reason"].startswith("waiting for 1 of 4 clients still uploading after the deadline; deadline in ")
    assert "after the deadline: secret-east; " in str(api.show(PLAN.name).waiting_for)
    scene.walk()

    with api.app.state.ctx.db.write() as session:
        session.execute(update(Transfer).values(grown_uptime=None))
    scene.let_the_deadline_pass()
    reason = "round 1 failed: only 1 of 4 updates arrived before the deadline, 4 are needed"
    assert scene.checked("GET", "/v1/task?wait=0").json()["reason"] == reason
    view = api.show(PLAN.name)
    assert (view.state, view.reason) == ("paused", f"{reason}; missing: {', '.join(OTHERS)}")
    scene.walk()
    late = scene.upload(scene.others[1])
    assert (late.status_code, "it failed: only 1 of 4 updates" in late.text) == (410, True)
    assert not any(name in late.text for name in OTHERS)

    api.admin("POST", f"{base}/resume")
    api.admin("POST", f"{base}/pause")
    assert scene.checked("GET", "/v1/task?wait=0").json()["reason"] == "paused by the operator"
    scene.walk()

    api.admin("POST", f"{base}/resume")
    sites = (scene.north, *scene.others)
    assert [scene.upload(site).status_code for site in sites] == [200] * 4
    scene.north.wait_for_model(1)
    for site in sites:
        assert api.call("PUT", "/v1/models/2/evaluation", site.token, json=MEASURED).status_code == 204
    scene.walk()

    for verb in ("revoke", "rotate"):
        assert api.call("POST", f"{base}/clients/secret-east/{verb}", scene.north.token).status_code == 403
    api.admin("POST", f"{base}/cancel")
    assert scene.checked("GET", "/v1/task?wait=0").json()["action"] == "cancelled"
    scene.walk()


def test_cause_of_a_failed_aggregation_is_shown_to_the_operator_only(scene: Scene) -> None:
    """The details of an error can contain anything."""
    with scene.api.app.state.ctx.db.write() as session:
        session.execute(update(Round).values(roster="[]"))  # does not contain the uploads' clients
    assert scene.upload(scene.north).status_code == 200  # folded at once
    task = scene.north.wait_for_task(lambda task: task.action != "wait")
    assert (task.action, task.reason) == ("paused", "round 1 failed: aggregation failed")
    assert "KeyError: 'north'" in scene.api.show(PLAN.name).reason
    scene.walk()
