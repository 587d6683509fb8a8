"""Federations over the API: creating them from a plan, changing their state, and what they wait for."""

import re

import pytest
from support.api import Api, problem_of
from support.api_calls import unique_plan, upload_update

from shared.contract.messages import FederationView
from shared.contract.plan import FederationPlan


class TestCreate:
    def test_creating_returns_the_federation(self, api: Api) -> None:
        plan = unique_plan()
        answer = api.call("POST", "/v1/federations", json=plan.model_dump(mode="json"))
        assert answer.status_code == 201
        view = FederationView.model_validate(answer.json())
        assert view.plan == plan
        assert (view.name, view.state, view.method, view.clients) == (plan.name, "created", "distrans", 0)
        assert (view.rounds_done, view.rounds_total, view.latest_model, view.round) == (0, 2, 0, None)
        assert answer.json() == api.admin("GET", f"/v1/federations/{plan.name}")

    def test_differences_from_the_paper_are_warnings_not_errors(self, api: Api) -> None:
        plan = {"name": unique_plan().name, "preset": "paper", "classes": ["a", "b"]}
        created = api.admin("POST", "/v1/federations", json=plan)
        (warning,) = created["warnings"]
        assert 'model.backbone = "lenet"' in warning
        other = api.admin("POST", "/v1/federations", json={"name": unique_plan().name, "classes": ["a", "b"]})
        assert other["warnings"] == []

    def test_a_minimal_plan_gets_the_defaults(self, api: Api) -> None:
        name = unique_plan().name
        view = api.admin("POST", "/v1/federations", json={"name": name, "classes": ["a", "b"]})
        assert view["plan"] == FederationPlan(name=name, classes=("a", "b")).model_dump(mode="json")

    def test_all_errors_of_a_plan_are_reported_at_once(self, api: Api) -> None:
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

    def test_errors_of_a_plan_suggest_what_was_meant(self, api: Api) -> None:
        plan = {"name": "no spaces", "classes": ["a", "b"], "image": {"hight": 3}, "method": {"name": "fedvag"}}
        answer = api.call("POST", "/v1/federations", json=plan)
        assert problem_of(answer) == (422, "invalid-request")
        name, image, method = answer.json()["errors"]
        assert name.endswith("starting with a letter or digit, but is 'no spaces'")
        assert image == "image.hight: unknown setting; did you mean height?"
        assert method.startswith("method: unknown value 'fedvag'; did you mean 'fedavg'? Valid values: distrans, ")

    def test_errors_in_parameters_and_other_bodies_are_readable(self, api: Api) -> None:
        name = api.admin("POST", "/v1/federations", json={"name": unique_plan().name, "classes": ["a", "b"]})["name"]
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

    def test_similar_names_are_suggested_to_operators_but_not_to_clients(self, api: Api) -> None:
        name = api.admin("POST", "/v1/federations", json={"name": unique_plan().name, "classes": ["a", "b"]})["name"]
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

    def test_settings_that_do_not_fit_together_are_refused(self, api: Api) -> None:
        plan = {"name": "x", "classes": ["a", "b"], "image": {"height": 5, "width": 5}}
        answer = api.call("POST", "/v1/federations", json=plan)
        assert problem_of(answer) == (422, "invalid-request")
        assert answer.json()["errors"] == [
            "body: model.backbone: lenet needs images of at least 14×14, but image.height × image.width is 5×5"
        ]

    def test_an_unknown_method_is_refused(self, api: Api) -> None:
        plan = {"name": "x", "classes": ["a", "b"], "method": {"name": "magic"}}
        answer = api.call("POST", "/v1/federations", json=plan)
        assert problem_of(answer) == (422, "invalid-request")
        assert answer.json()["errors"][0].startswith("method: ")

    def test_an_unknown_backbone_is_refused(self, api: Api) -> None:
        plan = {"name": "x", "classes": ["a", "b"], "model": {"backbone": "no_such_module:net"}}
        assert problem_of(api.call("POST", "/v1/federations", json=plan)) == (422, "invalid-backbone")
        assert problem_of(api.call("GET", "/v1/federations/x")) == (404, "no-such-federation")

    def test_a_used_name_is_refused(self, api: Api) -> None:
        plan = unique_plan()
        api.create(plan)
        again = api.call("POST", "/v1/federations", json=plan.model_dump(mode="json"))
        assert problem_of(again) == (409, "name-taken")
        assert api.show(plan.name).state == "running"


class TestStates:
    def test_every_change_of_state_is_idempotent(self, api: Api) -> None:
        plan = unique_plan()
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
    def test_changes_the_state_does_not_allow_are_refused(self, api: Api, way: list[str], wrong: list[str]) -> None:
        plan = unique_plan()
        api.create(plan, start=False)
        for action in way:
            api.admin("POST", f"/v1/federations/{plan.name}/{action}")
        before = api.admin("GET", f"/v1/federations/{plan.name}")
        for action in wrong:
            answer = api.call("POST", f"/v1/federations/{plan.name}/{action}")
            assert problem_of(answer) == (409, "wrong-state")
            assert "federation can be" in answer.json()["next_step"]
        assert api.admin("GET", f"/v1/federations/{plan.name}") == before

    def test_a_pause_shows_its_reason(self, api: Api) -> None:
        plan = unique_plan()
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
    def test_an_unknown_federation_cannot_be_changed(self, api: Api, action: str) -> None:
        answer = api.call("POST", f"/v1/federations/atlantis/{action}")
        assert problem_of(answer) == (404, "no-such-federation")
        assert answer.json()["detail"] == "There is no federation 'atlantis'."

    @pytest.mark.parametrize("part", ["", "/clients", "/rounds", "/metrics.csv", "/heterogeneity", "/model"])
    def test_an_unknown_federation_has_no_history(self, api: Api, part: str) -> None:
        assert problem_of(api.call("GET", f"/v1/federations/atlantis{part}")) == (404, "no-such-federation")


class TestShow:
    def test_waiting_for_follows_the_federation_from_creation_to_the_end(self, api: Api) -> None:
        plan = unique_plan(rounds={"count": 1, "min_clients": 2, "deadline_s": 600})
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
        upload_update(north)
        assert re.fullmatch(
            r"waiting for 1 of 2 clients: south; deadline in (10|9) min", str(api.show(plan.name).waiting_for)
        )
        upload_update(south)
        north.wait_for_model(1)
        view = api.show(plan.name)
        assert (view.state, view.reason, view.waiting_for) == ("finished", "all 1 rounds are done", None)
        assert (view.rounds_done, view.latest_model, view.round) == (1, 1, None)

    def test_the_list_has_no_plans(self, api: Api) -> None:
        plans = [unique_plan() for _ in range(2)]
        for plan in plans:
            api.create(plan)
        views = {view["name"]: view for view in api.admin("GET", "/v1/federations")}
        for plan in plans:
            shown = api.admin("GET", f"/v1/federations/{plan.name}")
            assert views[plan.name] == shown | {"plan": None, "stored_bytes": None}
        assert list(views) == sorted(views)
