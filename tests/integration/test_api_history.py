"""History over the API: rounds, metrics, heterogeneity, models, and the audit log."""

import csv
import io
import json

import pytest
import safetensors
import safetensors.torch
from support.api import Api, problem_of
from support.api_calls import unique_plan, upload_update
from support.coordinator import Site

from shared.contract.messages import HeterogeneityView, RoundView
from shared.contract.plan import FederationPlan
from shared.tensors.wire import digest, encode


@pytest.fixture(scope="module")
def trained(api: Api) -> tuple[Site, Site]:
    """Train two rounds with two sites; both evaluate the first model."""
    plan = unique_plan(rounds={"count": 3, "min_clients": 2})
    api.create(plan)
    sites = api.join(plan, "north", {"cat": 6, "dog": 2}), api.join(plan, "south", {"dog": 4})
    for number in (1, 2):
        for seed, site in enumerate(sites):
            upload_update(site, seed + 10 * number)
        for site in sites:
            site.wait_for_model(number)
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
    def test_rounds_show_uploads_and_pooled_accuracy(self, api: Api, trained: tuple[Site, Site]) -> None:
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

    def test_rounds_are_paged(self, api: Api, trained: tuple[Site, Site]) -> None:
        path = f"/v1/federations/{trained[0].plan.name}/rounds"
        pages = [
            [view["number"] for view in api.admin("GET", f"{path}?after={after}&limit={limit}")]
            for after, limit in ((0, 2), (2, 2), (3, 2), (1, 1))
        ]
        assert pages == [[1, 2], [3], [], [2]]

    def test_metrics_csv_has_one_row_per_round_and_client(self, api: Api, trained: tuple[Site, Site]) -> None:
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

    def test_heterogeneity_shows_class_counts_and_embeddings(self, api: Api, trained: tuple[Site, Site]) -> None:
        name = trained[0].plan.name
        view = HeterogeneityView.model_validate(api.admin("GET", f"/v1/federations/{name}/heterogeneity"))
        assert view.classes == ["cat", "dog"]
        assert view.clients == {"north": [6, 2], "south": [0, 4]}
        assert view.embeddings["north"] == pytest.approx([1, 1 / 3])
        assert view.dh == api.show(name).dh

    def test_heterogeneity_without_clients_is_empty(self, api: Api) -> None:
        plan = unique_plan()
        api.create(plan, start=False)
        view = api.admin("GET", f"/v1/federations/{plan.name}/heterogeneity")
        assert view == {"dh": None, "classes": ["cat", "dog"], "clients": {}, "embeddings": {}, "withheld": []}

    def test_models_contain_their_plan(self, api: Api, trained: tuple[Site, Site]) -> None:
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
    def test_following_after_returns_every_entry_once(self, api: Api) -> None:
        plan = unique_plan()
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
