"""Invites and clients, as the operator manages them over the API."""

from support.api import Api, problem_of
from support.api_calls import unique_plan

from shared.contract.messages import ClientView, InviteAnswer
from shared.contract.plan import FederationPlan


class TestInvites:
    def test_invites_expire_after_a_week_by_default(self, api: Api) -> None:
        plan = unique_plan()
        api.create(plan)
        path = f"/v1/federations/{plan.name}/invites"
        week, minute = (api.call("POST", path, **options) for options in ({}, {"json": {"expires_in_s": 60}}))
        assert (week.status_code, minute.status_code) == (201, 201)
        answers = [InviteAnswer.model_validate(answer.json()) for answer in (week, minute)]
        assert answers[0].token != answers[1].token
        assert {answer.federation for answer in answers} == {plan.name}
        assert 7 * 86400 - 3600 < answers[0].expires_at - answers[1].expires_at + 60 < 7 * 86400 + 60
        for seconds in (0, -1, 1e9, "soon"):
            assert problem_of(api.call("POST", path, json={"expires_in_s": seconds})) == (
                422,
                "invalid-request",
            )

    def test_ended_federations_have_no_invites(self, api: Api) -> None:
        plan = unique_plan()
        api.create(plan)
        token = api.admin("POST", f"/v1/federations/{plan.name}/invites")["token"]
        api.admin("POST", f"/v1/federations/{plan.name}/cancel")
        assert problem_of(api.call("POST", f"/v1/federations/{plan.name}/invites")) == (
            409,
            "federation-ended",
        )
        join = api.call("POST", "/v1/join", token, json={"name": "north", "class_counts": {"cat": 1}})
        assert problem_of(join) == (409, "federation-ended")


class TestClients:
    def test_the_operator_sees_what_the_agent_reported(self, api: Api) -> None:
        plan = unique_plan()
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

    def test_class_counts_can_be_updated(self, api: Api) -> None:
        plan = unique_plan()
        api.create(plan, start=False)
        site = api.join(plan, "north", {"cat": 1})
        answer = api.call("PATCH", "/v1/me", site.token, json={"class_counts": {"cat": 2, "dog": 9}})
        assert answer.json()["class_counts"] == {"cat": 2, "dog": 9}
        assert api.call("GET", "/v1/me", site.token).json() == answer.json()
        for counts, code in (({"cow": 1}, "unknown-class"), ({"cat": 0}, "no-data"), ({"cat": -1}, "invalid-request")):
            refused = api.call("PATCH", "/v1/me", site.token, json={"class_counts": counts})
            assert problem_of(refused) == (422, code)

    def test_revoke_and_rotate_by_name_or_id(self, api: Api) -> None:
        plan = unique_plan()
        api.create(plan, start=False)
        site = api.join(plan, "north", {"cat": 1})
        own = api.call("GET", "/v1/me", site.token).json()["id"]
        base = f"/v1/federations/{plan.name}/clients"
        for client in ("north", own):
            answer = api.admin("POST", f"{base}/{client}/rotate")
            assert answer["client_id"] == own
            assert api.call("GET", "/v1/me", answer["token"]).status_code == 200
        for client in (own, "north"):  # idempotent
            assert api.call("POST", f"{base}/{client}/revoke").status_code == 204
        assert problem_of(api.call("POST", f"{base}/north/rotate")) == (409, "client-not-active")
        for action in ("revoke", "rotate"):
            assert problem_of(api.call("POST", f"{base}/nobody/{action}")) == (404, "no-such-client")
        assert [view["state"] for view in api.admin("GET", base)] == ["revoked"]

    def test_the_name_of_a_client_that_left_can_be_reused(self, api: Api) -> None:
        plan = unique_plan()
        api.create(plan, start=False)
        first = api.join(plan, "north", {"cat": 1})
        assert api.call("DELETE", "/v1/me", first.token).status_code == 204
        api.join(plan, "north", {"cat": 1})
        views = api.admin("GET", f"/v1/federations/{plan.name}/clients")
        assert sorted((view["name"], view["state"]) for view in views) == [("north", "active"), ("north", "left")]
