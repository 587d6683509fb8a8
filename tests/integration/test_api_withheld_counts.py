"""Sites that keep their class counts to themselves."""

import pytest
from support.api import Api, problem_of
from support.api_calls import create_invite, unique_plan, upload_update
from support.coordinator import Site
from support.plans import update_tensors

from shared.contract.class_totals import CLASS_TOTALS
from shared.contract.plan import FederationPlan
from shared.tensors.names import SHARED

FEDAVG = {"name": "fedavg"}


@pytest.fixture
def sites(api: Api) -> list[Site]:
    """Two sites with disjoint classes, and one that withholds its counts."""
    plan = unique_plan(rounds={"count": 1, "min_clients": 3})
    api.create(plan)
    counts = {"north": {"cat": 6}, "south": {"dog": 4}, "west": {}}
    return [api.join(plan, name, held) for name, held in counts.items()]


def test_are_shown_as_unknown(api: Api, sites: list[Site]) -> None:
    assert api.call("GET", "/v1/me", token=sites[2].token).json()["class_counts"] == {}
    shown = api.admin("GET", f"/v1/federations/{sites[0].plan.name}/clients")
    assert [client["class_counts"] for client in shown] == [{"cat": 6, "dog": 0}, {"cat": 0, "dog": 4}, {}]


def test_count_for_nothing_in_class_totals_and_heterogeneity(api: Api, sites: list[Site]) -> None:
    assert sites[2].wait_for_round(1).facts[CLASS_TOTALS] == "6,4"
    path = f"/v1/federations/{sites[0].plan.name}"
    found = api.admin("GET", f"{path}/heterogeneity")
    assert found == {
        "dh": 1.0,
        "classes": ["cat", "dog"],
        "clients": {"north": [6, 0], "south": [0, 4]},
        "embeddings": {"north": [1.0, 0.0], "south": [0.0, 1.0]},
        "withheld": ["west"],
    }
    assert api.show(sites[0].plan.name).dh == 1.0
    own = api.call("GET", f"{path}/heterogeneity", token=sites[2].token).json()
    assert (own["clients"], own["withheld"]) == ({}, ["west"])
    other = api.call("GET", f"{path}/heterogeneity", token=sites[0].token).json()
    assert other["withheld"] == [], "a client sees only itself"


def test_weigh_as_much_as_others(api: Api) -> None:
    plan = unique_plan(method=FEDAVG, rounds={"count": 1, "min_clients": 2})
    api.create(plan)
    sites = [api.join(plan, "north", {"cat": 99}), api.join(plan, "west", {})]
    for seed, site in enumerate(sites):
        site.wait_for_round(1)
        upload_update(site, seed)
    finished = sites[0].wait_until_finished()
    assert finished.model is not None
    uploads = [update_tensors(plan, finished.facts, seed) for seed in range(2)]
    for name, tensor in sites[0].tensors(finished.model.url).items():
        if tensor.is_floating_point():
            mean = sum(upload[SHARED + name].double() for upload in uploads) / 2
            assert tensor.double().sub(mean).abs().max() < 1e-6


def test_do_not_hinder_a_federation_in_which_nobody_tells_any(api: Api) -> None:
    plan = unique_plan(method={"name": "distrans", "offset_aggregation": "auto"}, rounds={"count": 1})
    api.create(plan)
    site = api.join(plan, "west", {})
    assert site.wait_for_round(1).facts == {"offset_aggregation": "none"}
    assert api.show(plan.name).dh is None
    upload_update(site)
    assert CLASS_TOTALS not in site.wait_until_finished().facts


def test_can_be_withdrawn_and_told_later(api: Api, sites: list[Site]) -> None:
    for counts in ({}, {"cat": 1, "dog": 2}):
        answer = api.call("PATCH", "/v1/me", token=sites[0].token, json={"class_counts": counts})
        assert answer.json()["class_counts"] == counts


@pytest.mark.parametrize(
    "plan",
    [unique_plan(averaging="samples"), unique_plan(method={"name": "fedaws", "client_loss": "hinge"})],
    ids=["weights", "rows"],
)
def test_are_refused_where_the_plan_needs_them(api: Api, plan: FederationPlan) -> None:
    api.create(plan, start=False)
    invite = create_invite(api, plan.name)
    refused = api.call("POST", "/v1/join", token=invite, json={"name": "west", "class_counts": {}})
    assert problem_of(refused) == (422, "counts-required")
    assert plan.counts_needed_by is not None
    assert plan.counts_needed_by in refused.json()["detail"]
    site = api.join(plan, "west", {"cat": 1})
    refused = api.call("PATCH", "/v1/me", token=site.token, json={"class_counts": {}})
    assert problem_of(refused) == (422, "counts-required")
