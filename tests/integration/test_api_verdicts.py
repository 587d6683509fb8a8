"""Verdicts over the API: what is accepted, and who sees what."""

from typing import Any

import pytest
from support.api import Api, problem_of
from support.api_calls import unique_plan
from support.coordinator import Site

PAIRED = {"samples": 100, "both": 60, "only_served": 20, "only_alone": 5, "neither": 15}
EVALUATION = {"samples": 100, "correct": 80, "loss_sum": 40.0}


@pytest.fixture(scope="module")
def sites(api: Api) -> list[Site]:
    plan = unique_plan(rounds={"min_clients": 3})
    api.create(plan)
    return [api.join(plan, name, {"cat": 1}) for name in ("north", "south", "west")]


def put(api: Api, site: Site, **changes: Any) -> Any:
    return api.call("PUT", "/v1/models/0/evaluation", token=site.token, json=EVALUATION | changes)


def test_operator_sees_all_sites_that_share_and_a_client_only_itself(api: Api, sites: list[Site]) -> None:
    north, south, west = sites
    assert put(api, north, paired=PAIRED, candidate="offset+prior").status_code == 204
    assert put(api, south, paired=PAIRED | {"only_served": 5, "only_alone": 20}).status_code == 204
    assert put(api, west).status_code == 204
    path = f"/v1/federations/{north.plan.name}"
    view = api.admin("GET", path)
    assert view["verdict_summary"] == {
        "pays_off": 1,
        "no_difference": 0,
        "better_alone": 1,
        "not_shared": 1,
        "sentence": "Joining pays off at 1 of 2 sites; 1 does better alone; 1 more does not share its verdict.",
        "together": "All 2 together: 0.0 points (−6.9 to 6.9) on 200 test images.",
    }
    first, second = view["verdicts"]
    assert (first["client"], first["model"], second["client"]) == ("north", 0, "south")
    verdict = first["verdict"]
    assert (verdict["paired"], verdict["candidate"]) == (PAIRED, "offset+prior")
    assert verdict["sentence"] == "Joining pays off: +15.0 points (5.3 to 24.1) on 100 test images"
    for site, expected in ((north, [first]), (south, [second]), (west, [])):
        own = api.call("GET", path, token=site.token).json()
        assert (own["verdicts"], own["verdict_summary"]) == (expected, None)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"paired": PAIRED | {"both": 61}}, "both, only_served, only_alone and neither add up to 101, not to 100"),
        ({"paired": PAIRED | {"both": "60"}}, "paired.both: must be a whole number"),
        ({"paired": PAIRED | {"both": -1}}, "paired.both"),
        ({"paired": {**PAIRED, "images": []}}, "paired.images"),
        ({"candidate": "x" * 65}, "candidate"),
        ({"candidate": "\x1b[2J"}, "candidate"),
        ({"verdict": "splendid"}, "verdict"),
    ],
)
def test_counts_that_cannot_be_are_refused(api: Api, sites: list[Site], changes: Any, problem: str) -> None:
    answer = put(api, sites[0], **changes)
    assert problem_of(answer) == (422, "invalid-request")
    assert problem in "\n".join(answer.json()["errors"])


def test_more_images_than_registered_are_refused(api: Api, sites: list[Site]) -> None:
    answer = put(api, sites[0], paired=PAIRED | {"samples": 101, "both": 61})
    assert problem_of(answer) == (422, "too-many-samples")
    assert "covers 101 images" in answer.json()["detail"]
