"""What operators call: federations, their history, liveness and figures; and the form that all errors share."""

import csv
import gzip
import io
import itertools
import json
import logging
import re
from collections.abc import Iterator

import httpx
import psycopg
import pytest
import safetensors
import safetensors.torch
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.engine import make_url
from support.api import SCRAPE_TOKEN, Api, new_database, open_api
from support.coordinator import ADMIN_TOKEN, Site
from support.databases import KINDS, new_postgres_database
from support.plans import small_plan, update_body

from server.store.schema import upgrade
from server.store.session import Database
from shared import __version__
from shared.http.request_id import RequestIdFilter
from shared.plan import FederationPlan
from shared.schemas import ClientView, FederationView, HeterogeneityView, InviteAnswer, RoundView
from shared.wire import digest, encode

NUMBERS = itertools.count(1)


@pytest.fixture(scope="module", params=KINDS)
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """One coordinator for all tests: each has a federation of its own."""
    with open_api(new_database(request.param, request, tmp_path_factory.mktemp("api")), max_json_bytes=20_000) as api:
        yield api


def new_plan(**tables: object) -> FederationPlan:
    return small_plan(f"pets-{next(NUMBERS)}", **tables)


def problem_of(answer: httpx.Response) -> tuple[int, str]:
    """Status and code of an error, whose form is checked on the way."""
    body = answer.json()
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert body["status"] == answer.status_code
    assert body["request_id"] == answer.headers["X-Request-ID"]
    assert body["title"]
    assert body["detail"]
    return answer.status_code, body["code"]


def train(site: Site, seed: int = 0) -> None:
    """One site's part in a round."""
    task = site.task()
    assert task.round is not None
    assert site.put(task.round.id, update_body(site.plan, task.facts, seed)).status_code == 200


def follow(site: Site, model: int) -> None:
    """Wait until the coordinator has published this model."""
    task = site.task(wait_s=0)
    while task.model is None or task.model.number < model:
        task = site.task(after=task.ticket)


class TestCreate:
    def test_the_answer_is_the_federation(self, api: Api) -> None:
        plan = new_plan()
        answer = api.call("POST", "/v1/federations", json=plan.model_dump(mode="json"))
        assert answer.status_code == 201
        view = FederationView.model_validate(answer.json())
        assert view.plan == plan
        assert (view.name, view.state, view.method, view.clients) == (plan.name, "created", "distrans", 0)
        assert (view.rounds_done, view.rounds_total, view.latest_model, view.round) == (0, 2, 0, None)
        assert answer.json() == api.admin("GET", f"/v1/federations/{plan.name}")

    def test_a_plan_of_little_has_defaults_for_the_rest(self, api: Api) -> None:
        name = new_plan().name
        view = api.admin("POST", "/v1/federations", json={"name": name, "classes": ["a", "b"]})
        assert view["plan"] == FederationPlan(name=name, classes=("a", "b")).model_dump(mode="json")

    def test_every_fault_is_named_at_once(self, api: Api) -> None:
        plan = {
            "name": "no spaces",
            "classes": ["one"],
            "image": {"channels": 0},
            "model": {"backbone": "vgg"},
            "method": {"name": "distrans", "alpha": 2, "speed": 1},
            "rounds": {"count": 0, "quorum": "most"},
            "colour": "red",
        }
        answer = api.call("POST", "/v1/federations", json=plan)
        assert problem_of(answer) == (422, "invalid-request")
        fields = [fault.partition(":")[0] for fault in answer.json()["errors"]]
        assert sorted(fields) == [
            "classes",
            "colour",
            "image.channels",
            "method.alpha",
            "method.speed",
            "model.backbone",
            "name",
            "rounds.count",
            "rounds.quorum",
        ]
        assert all(fault in answer.json()["detail"] for fault in answer.json()["errors"])

    def test_faults_are_in_our_words(self, api: Api) -> None:
        plan = {"name": "no spaces", "classes": ["a", "b"], "image": {"hight": 3}, "method": {"name": "fedvag"}}
        answer = api.call("POST", "/v1/federations", json=plan)
        assert problem_of(answer) == (422, "invalid-request")
        name, image, method = answer.json()["errors"]
        assert name.endswith("the first a letter or digit; it is 'no spaces'")
        assert image == "image.hight: unknown setting; did you mean height?"
        assert method.startswith("method: unknown value 'fedvag'; did you mean 'fedavg'? Possible: distrans, ")

    def test_parameters_and_other_bodies_too(self, api: Api) -> None:
        name = api.admin("POST", "/v1/federations", json={"name": new_plan().name, "classes": ["a", "b"]})["name"]
        for path, body, fault in (
            ("rollback", {"to": "first"}, "to: must be a whole number, but is 'first'"),
            ("rollback", {}, "to: is missing"),
            ("invites", {"expires_in_s": -1}, "expires_in_s: must be "),
            ("pause", {"cause": "x"}, "cause: unknown setting"),
            ("pause", [], "body: must be a table, but is a list"),
        ):
            answer = api.call("POST", f"/v1/federations/{name}/{path}", json=body)
            assert problem_of(answer) == (422, "invalid-request")
            assert answer.json()["errors"][0].startswith(fault), answer.json()
        answer = api.call("GET", f"/v1/federations/{name}/rounds?limit=0")
        assert answer.json()["errors"] == ["query.limit: must be at least 1, but is '0'"]

    def test_a_near_name_is_suggested_to_the_operator(self, api: Api) -> None:
        name = api.admin("POST", "/v1/federations", json={"name": new_plan().name, "classes": ["a", "b"]})["name"]
        answer = api.call("GET", f"/v1/federations/{name}x")
        assert problem_of(answer) == (404, "no-such-federation")
        assert answer.json()["detail"] == f"There is no federation '{name}x'; did you mean {name!r}?"
        invite = api.admin("POST", f"/v1/federations/{name}/invites")["token"]
        site = api.http.post(
            "/v1/join", json={"name": "north", "class_counts": {"a": 1}}, headers={"Authorization": f"Bearer {invite}"}
        ).json()
        answer = api.call("POST", f"/v1/federations/{name}/clients/noth/revoke")
        assert answer.json()["detail"] == f"Federation {name!r} has no client 'noth'; did you mean 'north'?"
        asking = {"Authorization": f"Bearer {site['token']}"}
        answer = api.http.get(f"/v1/federations/{name}x", headers=asking)
        assert answer.json()["detail"] == f"There is no federation '{name}x'."

    def test_faults_between_fields(self, api: Api) -> None:
        plan = {"name": "x", "classes": ["a", "b"], "image": {"height": 5, "width": 5}}
        answer = api.call("POST", "/v1/federations", json=plan)
        assert problem_of(answer) == (422, "invalid-request")
        assert answer.json()["errors"] == [
            "body: model.backbone: lenet needs images of at least 14×14, image.height × image.width is 5×5"
        ]

    def test_an_unknown_method(self, api: Api) -> None:
        plan = {"name": "x", "classes": ["a", "b"], "method": {"name": "magic"}}
        answer = api.call("POST", "/v1/federations", json=plan)
        assert problem_of(answer) == (422, "invalid-request")
        assert answer.json()["errors"][0].startswith("method: ")

    def test_a_backbone_that_cannot_be_found(self, api: Api) -> None:
        plan = {"name": "x", "classes": ["a", "b"], "model": {"backbone": "no_such_module:net"}}
        assert problem_of(api.call("POST", "/v1/federations", json=plan)) == (422, "invalid-backbone")
        assert problem_of(api.call("GET", "/v1/federations/x")) == (404, "no-such-federation")

    def test_a_name_that_is_taken(self, api: Api) -> None:
        plan = new_plan()
        api.create(plan)
        again = api.call("POST", "/v1/federations", json=plan.model_dump(mode="json"))
        assert problem_of(again) == (409, "name-taken")
        assert api.show(plan.name).state == "running"


class TestBodies:
    def test_not_json(self, api: Api) -> None:
        answer = api.call("POST", "/v1/federations", content=b'{"name": ', headers={"Content-Type": "application/json"})
        assert problem_of(answer) == (422, "invalid-request")
        assert answer.json()["errors"] == ["body: not JSON at character 9: Expecting value"]

    def test_not_utf_8(self, api: Api) -> None:
        headers = {"Content-Type": "application/json"}
        answer = api.call("POST", "/v1/federations", content=b'{"name": "\xff"}', headers=headers)
        assert problem_of(answer) == (400, "bad-request")

    @pytest.mark.parametrize("body", [b"", b"[]", b"null", b'"text"', b"name=x"])
    def test_not_a_plan_at_all(self, api: Api, body: bytes) -> None:
        for headers in ({"Content-Type": "application/json"}, {"Content-Type": "text/plain"}, {}):
            answer = api.call("POST", "/v1/federations", content=body, headers=headers)
            assert problem_of(answer) == (422, "invalid-request")
            assert answer.json()["errors"][0].startswith("body: ")

    def test_compressed(self, api: Api) -> None:
        body = gzip.compress(new_plan().model_dump_json().encode())
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        answer = api.call("POST", "/v1/federations", content=body, headers=headers)
        assert problem_of(answer) == (415, "encoded-body")
        assert (answer.headers["Accept-Encoding"], bool(answer.json()["next_step"])) == ("identity", True)

    def test_too_large_by_its_length(self, api: Api) -> None:
        body = json.dumps({"name": "x", "classes": ["a", "b" * 30_000]}).encode()
        answer = api.call("POST", "/v1/federations", content=body, headers={"Content-Type": "application/json"})
        assert problem_of(answer) == (413, "too-large")
        assert "20000 bytes" in answer.json()["detail"]

    def test_too_large_without_a_length(self, api: Api) -> None:
        """It is refused as it arrives, before anybody looks into it."""
        pieces = (b"[" * 1000 for _ in range(100))
        answer = api.call("POST", "/v1/federations", content=pieces, headers={"Content-Type": "application/json"})
        assert problem_of(answer) == (413, "too-large")

    def test_a_body_of_just_the_limit_is_read(self, api: Api) -> None:
        body = b'{"reason": "tea"}'
        body += b" " * (20_000 - len(body))
        plan = new_plan()
        api.create(plan)
        path = f"/v1/federations/{plan.name}/pause"
        for content in (body, iter([body[:9000], body[9000:]])):
            answer = api.call("POST", path, content=content, headers={"Content-Type": "application/json"})
            assert (answer.status_code, answer.json()["reason"]) == (200, "tea")

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("GET", "/v1/federations/%00"),
            ("GET", "/v1/audit?federation=%00"),
            ("POST", "/v1/federations/{name}/clients/%00/revoke"),
            ("GET", "/v1/federations/{name}/rounds?after=2147483648"),
            ("GET", "/v1/federations/{name}/rounds?after=99999999999999999999"),
            ("GET", "/v1/federations/{name}/model?round=99999999999999999999"),
            ("GET", "/v1/audit?after=99999999999999999999"),
            ("GET", "/v1/audit?after=-1"),
            ("GET", "/v1/audit?limit=0"),
            ("GET", "/v1/audit?limit=1001"),
        ],
    )
    def test_values_that_no_database_can_look_for(self, api: Api, method: str, path: str) -> None:
        """They are the caller's fault, not the database's; SQLite finds nothing where PostgreSQL refuses to look."""
        plan = new_plan()
        api.create(plan)
        answer = api.call(method, path.format(name=plan.name))
        assert answer.status_code in (200, 404, 422)
        assert answer.json() == [] or problem_of(answer)[1] in (
            "no-such-federation",
            "no-such-client",
            "unusable-value",
            "invalid-request",
        )

    def test_numbers_of_rounds_and_models_out_of_range(self, api: Api) -> None:
        plan = new_plan()
        api.create(plan)
        site = api.join(plan, "north", {"cat": 1})
        for number in (-1, 2**31, 10**30):
            for method, path in (
                ("GET", f"/v1/rounds/{number}/model"),
                ("GET", f"/v1/rounds/{number}/personal"),
                ("PUT", f"/v1/rounds/{number}/update"),
                ("PUT", f"/v1/models/{number}/evaluation"),
                ("GET", f"/v1/federations/{plan.name}/personal?model={number}"),
            ):
                answer = api.call(method, path, site.token, json={"samples": 0, "correct": 0, "loss_sum": 0})
                assert problem_of(answer) == (422, "invalid-request")

    def test_a_reason_with_a_nul_character(self, api: Api) -> None:
        plan = new_plan()
        api.create(plan)
        answer = api.call("POST", f"/v1/federations/{plan.name}/pause", json={"reason": "a\0b"})
        assert answer.status_code in (200, 422)  # SQLite can keep it


class TestStates:
    def test_each_change_again_has_no_effect(self, api: Api) -> None:
        plan = new_plan()
        api.create(plan, start=False)
        for action, state in (
            ("start", "running"),
            ("pause", "paused"),
            ("resume", "running"),
            ("cancel", "cancelled"),
        ):
            path = f"/v1/federations/{plan.name}/{action}"
            first = FederationView.model_validate(api.admin("POST", path))
            second = FederationView.model_validate(api.admin("POST", path))
            assert (first.state, second.state, second.state_since) == (state, state, first.state_since)
        actions = [line["action"] for line in api.admin("GET", f"/v1/audit?federation={plan.name}")]
        assert actions == [f"federation.{action}" for action in ("create", "start", "pause", "resume", "cancel")]

    @pytest.mark.parametrize(
        ("way", "wrong"),
        [
            ([], ["pause", "resume"]),
            (["start", "pause"], ["start"]),
            (["cancel"], ["start", "pause", "resume"]),
            (["start", "pause", "cancel"], ["start", "pause", "resume"]),
        ],
    )
    def test_changes_that_the_state_does_not_allow(self, api: Api, way: list[str], wrong: list[str]) -> None:
        plan = new_plan()
        api.create(plan, start=False)
        for action in way:
            api.admin("POST", f"/v1/federations/{plan.name}/{action}")
        before = api.admin("GET", f"/v1/federations/{plan.name}")
        for action in wrong:
            answer = api.call("POST", f"/v1/federations/{plan.name}/{action}")
            assert problem_of(answer) == (409, "wrong-state")
            assert "is possible when it is" in answer.json()["next_step"]
        assert api.admin("GET", f"/v1/federations/{plan.name}") == before

    def test_the_reason_of_a_pause(self, api: Api) -> None:
        plan = new_plan()
        api.create(plan)
        paused = api.admin("POST", f"/v1/federations/{plan.name}/pause", json={"reason": "maintenance until noon"})
        assert (paused["reason"], paused["waiting_for"]) == (
            "maintenance until noon",
            "waiting for the operator to resume it",
        )
        assert api.admin("POST", f"/v1/federations/{plan.name}/resume")["reason"] == ""
        assert api.admin("POST", f"/v1/federations/{plan.name}/pause")["reason"] == "paused by the operator"
        too_long = api.call("POST", f"/v1/federations/{plan.name}/pause", json={"reason": "x" * 501})
        assert problem_of(too_long) == (422, "invalid-request")

    @pytest.mark.parametrize("action", ["start", "pause", "resume", "cancel", "invites"])
    def test_an_unknown_federation(self, api: Api, action: str) -> None:
        answer = api.call("POST", f"/v1/federations/atlantis/{action}")
        assert problem_of(answer) == (404, "no-such-federation")
        assert answer.json()["detail"] == "There is no federation 'atlantis'."

    @pytest.mark.parametrize("part", ["", "/clients", "/rounds", "/metrics.csv", "/heterogeneity", "/model"])
    def test_history_of_an_unknown_federation(self, api: Api, part: str) -> None:
        assert problem_of(api.call("GET", f"/v1/federations/atlantis{part}")) == (404, "no-such-federation")


class TestInvites:
    def test_how_long_they_last(self, api: Api) -> None:
        plan = new_plan()
        api.create(plan)
        path = f"/v1/federations/{plan.name}/invites"
        week, minute = (api.call("POST", path, **options) for options in ({}, {"json": {"expires_in_s": 60}}))
        assert (week.status_code, minute.status_code) == (201, 201)
        answers = [InviteAnswer.model_validate(answer.json()) for answer in (week, minute)]
        assert answers[0].token != answers[1].token
        assert {answer.federation for answer in answers} == {plan.name}
        assert 7 * 86400 - 3600 < answers[0].expires_at - answers[1].expires_at + 60 < 7 * 86400 + 60
        for seconds in (0, -1, 1e9, "soon"):
            assert problem_of(api.call("POST", path, json={"expires_in_s": seconds})) == (422, "invalid-request")

    def test_none_for_a_federation_that_has_ended(self, api: Api) -> None:
        plan = new_plan()
        api.create(plan)
        token = api.admin("POST", f"/v1/federations/{plan.name}/invites")["token"]
        api.admin("POST", f"/v1/federations/{plan.name}/cancel")
        assert problem_of(api.call("POST", f"/v1/federations/{plan.name}/invites")) == (409, "federation-ended")
        join = api.call("POST", "/v1/join", token, json={"name": "north", "class_counts": {"cat": 1}})
        assert problem_of(join) == (409, "federation-ended")


class TestClients:
    def test_what_the_operator_sees(self, api: Api) -> None:
        plan = new_plan()
        api.create(plan, start=False)
        token = api.admin("POST", f"/v1/federations/{plan.name}/invites")["token"]
        body = {"name": "north", "class_counts": {"dog": 4}, "agent_version": "1.2", "device": "cuda:0"}
        joined = api.call("POST", "/v1/join", token, json=body).json()
        assert FederationPlan.model_validate(joined["plan"]) == plan
        (found,) = api.admin("GET", f"/v1/federations/{plan.name}/clients")
        view = ClientView.model_validate(found)
        assert (view.id, view.name, view.state, view.federation) == (joined["client_id"], "north", "active", plan.name)
        assert (view.class_counts, view.agent_version, view.device) == ({"cat": 0, "dog": 4}, "1.2", "cuda:0")
        assert view.last_seen_at >= view.joined_at

    def test_new_class_counts(self, api: Api) -> None:
        plan = new_plan()
        api.create(plan, start=False)
        site = api.join(plan, "north", {"cat": 1})
        answer = api.call("PATCH", "/v1/me", site.token, json={"class_counts": {"cat": 2, "dog": 9}})
        assert answer.json()["class_counts"] == {"cat": 2, "dog": 9}
        assert api.call("GET", "/v1/me", site.token).json() == answer.json()
        for counts, code in (({"cow": 1}, "unknown-class"), ({}, "no-data"), ({"cat": -1}, "invalid-request")):
            refused = api.call("PATCH", "/v1/me", site.token, json={"class_counts": counts})
            assert problem_of(refused) == (422, code)

    def test_revoke_and_rotate_by_name_or_id(self, api: Api) -> None:
        plan = new_plan()
        api.create(plan, start=False)
        site = api.join(plan, "north", {"cat": 1})
        own = api.call("GET", "/v1/me", site.token).json()["id"]
        base = f"/v1/federations/{plan.name}/clients"
        for client in ("north", own):
            answer = api.admin("POST", f"{base}/{client}/rotate")
            assert answer["client_id"] == own
            assert api.call("GET", "/v1/me", answer["token"]).status_code == 200
        for client in (own, "north"):  # again: no effect
            assert api.call("POST", f"{base}/{client}/revoke").status_code == 204
        assert problem_of(api.call("POST", f"{base}/north/rotate")) == (409, "client-not-active")
        for action in ("revoke", "rotate"):
            assert problem_of(api.call("POST", f"{base}/nobody/{action}")) == (404, "no-such-client")
        assert [view["state"] for view in api.admin("GET", base)] == ["revoked"]

    def test_a_name_is_free_again_after_its_holder_has_gone(self, api: Api) -> None:
        plan = new_plan()
        api.create(plan, start=False)
        first = api.join(plan, "north", {"cat": 1})
        assert api.call("DELETE", "/v1/me", first.token).status_code == 204
        api.join(plan, "north", {"cat": 1})
        views = api.admin("GET", f"/v1/federations/{plan.name}/clients")
        assert sorted((view["name"], view["state"]) for view in views) == [("north", "active"), ("north", "left")]


class TestShow:
    def test_what_it_waits_for(self, api: Api) -> None:
        """From creation to the end, in words."""
        plan = new_plan(rounds={"count": 1, "min_clients": 2, "deadline_s": 600})
        api.create(plan, start=False)
        assert api.show(plan.name).waiting_for is None
        api.admin("POST", f"/v1/federations/{plan.name}/start")
        assert api.show(plan.name).waiting_for == "waiting for clients to join: 0 of at least 2; deadline in 7 days"
        north = api.join(plan, "north", {"cat": 1})
        view = api.show(plan.name)
        assert view.waiting_for == "waiting for clients to join: 1 of at least 2; deadline in 7 days"
        assert view.waiting_since == view.state_since
        south = api.join(plan, "south", {"dog": 1})
        view = api.show(plan.name)
        assert view.waiting_for == "waiting for 2 of 2 clients to connect: north, south; deadline in 7 days"
        assert view.round is not None
        assert view.round.deadline_at is None
        for site in (north, south):
            site.task(0)
        api.app.state.heartbeats.flush(api.app.state.ctx)
        view = api.show(plan.name)
        assert view.waiting_for == "waiting for 2 of 2 clients: north, south; deadline in 10 min"
        assert view.round is not None
        assert (view.round.number, view.round.state, view.round.participants, view.round.updates) == (1, "open", 2, 0)
        assert (view.waiting_since, view.waiting_until) == (
            view.round.opened_at,
            pytest.approx(view.round.deadline_at, abs=5),
        )
        assert view.round.deadline_at == pytest.approx(view.round.opened_at + 600, abs=30)
        assert (view.clients, view.dh) == (2, 1.0)
        train(north)
        assert re.fullmatch(
            r"waiting for 1 of 2 clients: south; deadline in (10|9) min", str(api.show(plan.name).waiting_for)
        )
        train(south)
        follow(north, 1)
        view = api.show(plan.name)
        assert (view.state, view.reason, view.waiting_for) == ("finished", "all 1 rounds are done", None)
        assert (view.rounds_done, view.latest_model, view.round) == (1, 1, None)

    def test_the_list_leaves_plans_out(self, api: Api) -> None:
        plans = [new_plan() for _ in range(2)]
        for plan in plans:
            api.create(plan)
        views = {view["name"]: view for view in api.admin("GET", "/v1/federations")}
        for plan in plans:
            shown = api.admin("GET", f"/v1/federations/{plan.name}")
            assert views[plan.name] == shown | {"plan": None}
        assert list(views) == sorted(views)


@pytest.fixture(scope="module")
def trained(api: Api) -> tuple[Site, Site]:
    """Two rounds of two sites, the first model measured by both."""
    plan = new_plan(rounds={"count": 3, "min_clients": 2})
    api.create(plan)
    sites = api.join(plan, "north", {"cat": 6, "dog": 2}), api.join(plan, "south", {"dog": 4})
    for number in (1, 2):
        for seed, site in enumerate(sites):
            train(site, seed + 10 * number)
        for site in sites:
            follow(site, number)
    measured = [
        {"samples": 10, "correct": 5, "loss_sum": 8.0},
        {
            "samples": 30,
            "correct": 27,
            "loss_sum": 3,
            "negatives": 10,
            "negatives_correct": 9,
            "negatives_as_own": 1,
        },
    ]
    for site, body in zip(sites, measured, strict=True):
        assert api.call("PUT", "/v1/models/1/evaluation", site.token, json=body).status_code == 204
    return sites


class TestHistory:
    def test_rounds(self, api: Api, trained: tuple[Site, Site]) -> None:
        path = f"/v1/federations/{trained[0].plan.name}/rounds"
        rounds = [RoundView.model_validate(view) for view in api.admin("GET", path)]
        assert [(view.number, view.state, view.updates) for view in rounds] == [
            (1, "done", 2),
            (2, "done", 2),
            (3, "open", 0),
        ]
        assert rounds[0].closed_at is not None
        assert rounds[0].opened_at <= rounds[0].uploads[0].received_at <= rounds[0].closed_at
        assert [upload.client for upload in rounds[0].uploads] == ["north", "south"]
        assert rounds[0].uploads[0].report.samples == 10
        assert rounds[0].evaluation is not None
        assert (rounds[0].evaluation.samples, rounds[0].evaluation.accuracy) == (40, 32 / 40)
        assert rounds[0].evaluation.loss == 11 / 40
        assert rounds[0].client_evaluations["south"].negative_accuracy == 0.9
        assert rounds[1].evaluation is None
        assert rounds[2].waiting_for is not None

    def test_pages_of_rounds(self, api: Api, trained: tuple[Site, Site]) -> None:
        path = f"/v1/federations/{trained[0].plan.name}/rounds"
        pages = [
            [view["number"] for view in api.admin("GET", f"{path}?after={after}&limit={limit}")]
            for after, limit in ((0, 2), (2, 2), (3, 2), (1, 1))
        ]
        assert pages == [[1, 2], [3], [], [2]]

    def test_metrics_csv(self, api: Api, trained: tuple[Site, Site]) -> None:
        answer = api.call("GET", f"/v1/federations/{trained[0].plan.name}/metrics.csv")
        assert answer.headers["Content-Type"].startswith("text/csv")
        rows = list(csv.DictReader(io.StringIO(answer.text)))
        assert [(row["round"], row["client"], row["test_accuracy"]) for row in rows] == [
            ("1", "north", "0.5"),
            ("1", "south", "0.9"),
            ("1", "(all)", "0.8"),
            ("2", "north", ""),
            ("2", "south", ""),
        ]
        assert {row["samples"] for row in rows if row["client"] != "(all)"} == {"10"}
        assert {row["state"] for row in rows} == {"done"}

    def test_heterogeneity(self, api: Api, trained: tuple[Site, Site]) -> None:
        name = trained[0].plan.name
        view = HeterogeneityView.model_validate(api.admin("GET", f"/v1/federations/{name}/heterogeneity"))
        assert view.classes == ["cat", "dog"]
        assert view.clients == {"north": [6, 2], "south": [0, 4]}
        assert view.embeddings["north"] == pytest.approx([1, 1 / 3])
        assert view.dh == api.show(name).dh

    def test_heterogeneity_of_nobody(self, api: Api) -> None:
        plan = new_plan()
        api.create(plan, start=False)
        view = api.admin("GET", f"/v1/federations/{plan.name}/heterogeneity")
        assert view == {"dh": None, "classes": ["cat", "dog"], "clients": {}, "embeddings": {}}

    def test_models_carry_their_plan(self, api: Api, trained: tuple[Site, Site]) -> None:
        plan = trained[0].plan
        path = f"/v1/federations/{plan.name}/model"
        bodies = [api.call("GET", f"{path}{query}").content for query in ("?round=0", "?round=1", "?round=2", "")]
        assert len({digest(body) for body in bodies}) == 3
        assert bodies[2] == bodies[3]
        for number, body in enumerate(bodies[:3]):
            header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
            assert header["__metadata__"]["model"] == str(number)
            assert FederationPlan.model_validate_json(header["__metadata__"]["plan"]) == plan
            tensors = safetensors.torch.load(body)
            assert encode(tensors, header["__metadata__"]) == body
        assert problem_of(api.call("GET", f"{path}?round=3")) == (404, "no-such-model")
        assert problem_of(api.call("GET", f"{path}?round=last")) == (422, "invalid-request")

    def test_evaluations_must_add_up(self, api: Api, trained: tuple[Site, Site]) -> None:
        for body in ({"samples": 1, "correct": 2}, {"samples": 3, "correct": 1, "negatives": 4}):
            answer = api.call("PUT", "/v1/models/2/evaluation", trained[0].token, json=body | {"loss_sum": 1})
            assert problem_of(answer) == (422, "inconsistent-evaluation")
        for text in (
            b'{"samples": 1, "correct": 1, "loss_sum": Infinity}',
            b'{"samples": 1, "correct": 1, "loss_sum": 1e999}',
        ):
            headers = {"Content-Type": "application/json"}
            answer = api.call("PUT", "/v1/models/2/evaluation", trained[0].token, content=text, headers=headers)
            assert problem_of(answer) == (422, "invalid-request")
        body = {"samples": 1, "correct": 1, "loss_sum": 0}
        answer = api.call("PUT", "/v1/models/9/evaluation", trained[0].token, json=body)
        assert problem_of(answer) == (404, "no-such-model")


class TestAudit:
    def test_pages(self, api: Api) -> None:
        """Following `after` from page to page gives every line once, oldest first."""
        plan = new_plan()
        api.create(plan)
        for number in range(5):
            api.join(plan, f"site-{number}", {"cat": 1})
        whole = api.admin("GET", f"/v1/audit?federation={plan.name}&limit=1000")
        assert len(whole) == 12
        paged: list[dict[str, object]] = []
        while page := api.admin(
            "GET", f"/v1/audit?federation={plan.name}&limit=5&after={paged[-1]['id'] if paged else 0}"
        ):
            assert len(page) <= 5
            paged += page
        assert paged == whole
        assert (whole[0]["actor"], whole[0]["action"], whole[0]["address"]) == (
            "admin",
            "federation.create",
            "testclient",
        )
        joined = [line for line in whole if line["action"] == "client.join"]
        assert [line["actor"] for line in joined] == [f"client:site-{number}" for number in range(5)]
        everything = api.admin("GET", f"/v1/audit?after={whole[0]['id'] - 1}&limit=12")
        assert [line["id"] for line in everything] == [line["id"] for line in whole]


class TestOperations:
    def test_the_root_leads_to_the_description(self, api: Api) -> None:
        answer = api.http.get("/", follow_redirects=False)
        assert (answer.status_code, answer.headers["Location"]) == (307, "/docs")

    def test_alive_and_ready(self, api: Api) -> None:
        assert api.call("GET", "/healthz", None).json() == {"status": "ok", "version": __version__}
        assert api.call("GET", "/readyz", None).json() == {"status": "ready"}

    @pytest.mark.parametrize("token", [ADMIN_TOKEN, SCRAPE_TOKEN])
    def test_figures_for_prometheus(self, api: Api, token: str) -> None:
        plan = new_plan(rounds={"count": 1})
        api.create(plan)
        site = api.join(plan, "north", {"cat": 1})
        train(site)
        follow(site, 1)
        answer = api.call("GET", "/metrics", token)
        assert answer.headers["Content-Type"].startswith("text/plain")
        found = {
            (sample.name, sample.labels.get("state") or sample.labels.get("client")): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
            if sample.labels.get("federation") in (plan.name, None)
        }
        assert found.pop(("distrans_client_silent_seconds", "north")) >= 0
        assert found.pop(("distrans_blob_bytes", None)) > 0
        assert found == {
            ("distrans_rounds_done", None): 1,
            ("distrans_federation_state", "finished"): 1,
            ("distrans_clients", "active"): 1,
            ("distrans_rounds", "done"): 1,
            ("distrans_updates", None): 1,
        }

    def test_no_scrape_token_is_not_an_empty_one(self, db_url: str) -> None:
        with open_api(db_url) as api:
            api.app.state.settings = type(api.app.state.settings)(db_url, ADMIN_TOKEN)
            for token in ("", "None", SCRAPE_TOKEN):
                assert api.call("GET", "/metrics", token).status_code == 401
            assert api.call("GET", "/metrics", ADMIN_TOKEN).status_code == 200

    def test_a_database_that_goes_away_and_comes_back(
        self, postgres_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        url = new_postgres_database(postgres_url)
        name = make_url(url).database
        upgrade_at(url)
        with open_api(url) as api:
            assert api.call("GET", "/readyz", None).status_code == 200
            with psycopg.connect(postgres_url, autocommit=True) as connection:
                connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
            for path in ("/readyz", "/v1/federations", "/metrics"):
                answer = api.call("GET", path)
                assert problem_of(answer) == (503, "database-unavailable")
                assert int(answer.headers["Retry-After"]) > 0
            assert api.call("GET", "/healthz", None).status_code == 200
            with psycopg.connect(postgres_url, autocommit=True) as connection:
                connection.execute(f'CREATE DATABASE "{name}"')
            upgrade_at(url)
            assert api.call("GET", "/readyz", None).status_code == 200
            assert api.call("GET", "/v1/federations").json() == []
        (first, *_) = [record for record in caplog.records if record.getMessage() == "the database failed"]
        assert first.exc_info is not None
        assert f'database "{name}" does not exist' in str(first.exc_info[1])


def upgrade_at(url: str) -> None:
    db = Database(url)
    upgrade(db)
    db.close()


class TestProblems:
    @pytest.mark.parametrize("path", ["/v2", "/v1", "/v1/federations/x/y/z", "/favicon.ico"])
    def test_unknown_paths(self, api: Api, path: str) -> None:
        answer = api.http.get(path, follow_redirects=False)
        assert problem_of(answer) == (404, "not-found")

    @pytest.mark.parametrize(
        ("method", "path"), [("DELETE", "/healthz"), ("PUT", "/v1/federations"), ("POST", "/v1/me")]
    )
    def test_wrong_methods(self, api: Api, method: str, path: str) -> None:
        answer = api.call(method, path)
        assert problem_of(answer) == (405, "method-not-allowed")
        assert answer.headers["Allow"]

    @pytest.mark.parametrize(
        ("path", "allowed"),
        [
            ("/v1/me", "DELETE, GET, PATCH"),
            ("/v1/rounds/1/update", "DELETE, HEAD, PATCH, POST, PUT"),
            ("/v1/rounds/1/model", "GET, HEAD"),
        ],
    )
    def test_every_method_of_a_path_is_allowed(self, api: Api, path: str, allowed: str) -> None:
        """Not only those of the first function that is registered for the path."""
        answer = api.call("OPTIONS", path)
        assert (problem_of(answer), answer.headers["Allow"]) == ((405, "method-not-allowed"), allowed)

    @pytest.mark.parametrize("path", ["/v1/federations/", "/healthz/", "/docs/", "/v1/federations//"])
    def test_a_slash_at_the_end_redirects_nobody(self, api: Api, path: str) -> None:
        """A redirect would be to the host that the caller names, which may be anybody's."""
        answer = api.http.get(path, headers={"Host": "evil.example"}, follow_redirects=False)
        assert problem_of(answer) == (404, "not-found")
        assert answer.json()["next_step"] == "Leave out the slash at the end of the path."
        assert "evil" not in answer.text + repr(answer.headers)

    @pytest.mark.parametrize(
        ("call", "fault"),
        [
            ("/v1/audit?limits=5", "query.limits: unknown parameter; did you mean limit?"),
            ("/v1/audit?Federation=x", "query.Federation: unknown parameter; did you mean federation?"),
            ("/v1/federations?page=2", "query.page: unknown parameter; this call takes none"),
        ],
    )
    def test_unknown_query_parameters_are_not_ignored(self, api: Api, call: str, fault: str) -> None:
        answer = api.call("GET", call)
        assert (problem_of(answer), answer.json()["errors"]) == ((422, "invalid-request"), [fault])
        assert problem_of(api.call("GET", call, token="nobody's")) == (401, "invalid-token")

    def test_health_may_be_asked_with_anything(self, api: Api) -> None:
        """Monitors and load balancers add parameters of their own."""
        assert api.call("GET", "/healthz?source=monitor").status_code == 200
        assert api.call("GET", "/readyz?source=monitor").status_code == 200

    def test_an_error_that_nobody_expected(self, db_url: str, caplog: pytest.LogCaptureFixture) -> None:
        """The caller gets the request's id and nothing of the inside; the log has the rest under that id."""
        caplog.handler.addFilter(RequestIdFilter())

        def boom() -> None:
            raise RuntimeError("a secret of the house")

        with open_api(db_url) as api:
            api.app.add_api_route("/boom", boom)
            answer = api.call("GET", "/boom", headers={"X-Request-ID": "ticket-17"})
        assert problem_of(answer) == (500, "internal-error")
        assert answer.json()["request_id"] == "ticket-17"
        assert "secret" not in answer.text
        (logged,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert logged.exc_info is not None
        assert str(logged.exc_info[1]) == "a secret of the house"
        assert logged.__dict__["request_id"] == "ticket-17"


class TestRequestIds:
    @pytest.mark.parametrize("given", ["a", "0d9f0c", "Trace_1.2-3", "x" * 64])
    def test_a_sane_one_is_kept(self, api: Api, given: str) -> None:
        answer = api.call("GET", "/v1/federations/atlantis", headers={"X-Request-ID": given})
        assert (answer.headers["X-Request-ID"], answer.json()["request_id"]) == (given, given)

    @pytest.mark.parametrize("given", ["", " ", "x" * 65, "a b", "a\tb", "é", "<script>", "a/b"])
    def test_another_is_replaced(self, api: Api, given: str) -> None:
        headers = {"X-Request-ID": given.encode("latin-1")}
        answer = api.call("GET", "/v1/federations/atlantis", headers=headers)
        made = answer.headers["X-Request-ID"]
        assert re.fullmatch(r"[0-9a-f]{16}", made)
        assert answer.json()["request_id"] == made

    def test_each_request_has_its_own(self, api: Api) -> None:
        ids = {api.call("GET", "/healthz").headers["X-Request-ID"] for _ in range(20)}
        assert len(ids) == 20

    def test_it_is_in_the_log(self, api: Api, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        caplog.handler.addFilter(RequestIdFilter())
        api.call("GET", "/v1/audit?limit=2", headers={"X-Request-ID": "ticket-18"})
        (line,) = [record for record in caplog.records if record.name == "server.access"]
        assert line.getMessage() == "GET /v1/audit 200"
        logged = line.__dict__
        assert (logged["request_id"], logged["status"], logged["path"]) == ("ticket-18", 200, "/v1/audit")
        assert logged["client_address"] == "testclient"
        assert logged["duration_ms"] >= 0

    def test_a_path_cannot_forge_a_line_of_the_log(self, api: Api, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        api.call("GET", "/v1/x%0A2026-01-01 INFO all is well%1B[2J")
        (line,) = [record for record in caplog.records if record.name == "server.access"]
        assert line.getMessage() == "GET /v1/x%0A2026-01-01%20INFO%20all%20is%20well%1B%5B2J 404"
