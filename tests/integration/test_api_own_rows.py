"""A client sees its own rows of a federation, and nobody else's."""

import csv
import io
from collections.abc import Iterator

import pytest
from support.api import Api, open_api
from support.coordinator import Site
from support.databases import KINDS, new_database
from support.plans import small_plan, update_body

from shared.contract.plan import FederationPlan

MEASURED = {"samples": 10, "correct": 7, "loss_sum": 3.0}


@pytest.fixture(scope="module", params=KINDS)
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Api, Site, Site]]:
    """Run one round with two clients, which upload and evaluate; they are then in the second round."""
    plan: FederationPlan = small_plan("pets", rounds={"min_clients": 2, "count": 3})
    with open_api(new_database(request.param, request, tmp_path_factory.mktemp("trained"))) as api:
        api.create(plan)
        api.create(small_plan("birds"))
        north, south = (api.join(plan, name, counts) for name, counts in (("north", {"cat": 3}), ("south", {"dog": 5})))
        for seed, site in enumerate((north, south)):
            task = site.task()
            assert task.round is not None
            assert site.put(task.round.id, update_body(plan, task.facts, seed, samples=7 + seed)).status_code == 200
        for site in (north, south):
            site.wait_for_model(1)
            assert api.call("PUT", "/v1/models/1/evaluation", site.token, json=MEASURED).status_code == 204
        yield api, north, south


class TestOwnRows:
    def test_a_client_sees_its_own_federation_only(self, trained: tuple[Api, Site, Site]) -> None:
        api, north, _ = trained
        assert [view["name"] for view in api.call("GET", "/v1/federations", north.token).json()] == ["pets"]
        assert [view["name"] for view in api.admin("GET", "/v1/federations")] == ["birds", "pets"]

    def test_a_client_sees_only_itself_among_the_clients(self, trained: tuple[Api, Site, Site]) -> None:
        api, north, _ = trained
        (own,) = api.call("GET", "/v1/federations/pets/clients", north.token).json()
        assert own == api.call("GET", "/v1/me", north.token).json()
        assert (own["name"], own["class_counts"]) == ("north", {"cat": 3, "dog": 0})
        assert [view["name"] for view in api.admin("GET", "/v1/federations/pets/clients")] == ["north", "south"]

    def test_a_client_sees_its_own_uploads_only(self, trained: tuple[Api, Site, Site]) -> None:
        api, _, south = trained
        first, second = api.call("GET", "/v1/federations/pets/rounds", south.token).json()
        assert [upload["client"] for upload in first["uploads"]] == ["south"]
        assert list(first["client_evaluations"]) == ["south"]
        assert first["evaluation"] is None  # with two clients, the pooled accuracy would reveal the other's
        assert (first["participants"], first["updates"], second["uploads"]) == (2, 2, [])
        for_the_admin = api.admin("GET", "/v1/federations/pets/rounds")[0]
        assert [upload["client"] for upload in for_the_admin["uploads"]] == ["north", "south"]
        assert for_the_admin["evaluation"]["samples"] == 20

    def test_a_client_sees_its_own_metrics_only(self, trained: tuple[Api, Site, Site]) -> None:
        api, north, _ = trained
        answer = api.call("GET", "/v1/federations/pets/metrics.csv", north.token)
        rows = list(csv.DictReader(io.StringIO(answer.text)))
        assert [(row["round"], row["client"], row["samples"]) for row in rows] == [("1", "north", "7")]

    def test_a_client_sees_its_own_class_counts_only(self, trained: tuple[Api, Site, Site]) -> None:
        api, north, _ = trained
        view = api.call("GET", "/v1/federations/pets/heterogeneity", north.token).json()
        assert (view["clients"], view["embeddings"]) == ({"north": [3, 0]}, {"north": [1.0, 0.0]})
        assert api.admin("GET", "/v1/federations/pets/heterogeneity")["clients"] == {"north": [3, 0], "south": [0, 5]}

    def test_a_client_gets_its_own_personal_tensors_only(self, trained: tuple[Api, Site, Site]) -> None:
        """The same URL returns each caller's own offset; nothing in the request can name another client."""
        _, north, south = trained
        task = north.task()
        assert task.personal_url is not None
        own = [site.http.get(task.personal_url, headers=site.headers) for site in (north, south)]
        assert own[0].content != own[1].content
        ids = [site.http.get("/v1/me", headers=site.headers).json()["id"] for site in (north, south)]
        for name in ("client", "client_id", "id", "name"):
            asked = north.http.get(task.personal_url, params={name: ids[1]}, headers=north.headers)
            assert asked.status_code == 422
        tagged = north.http.get(task.personal_url, headers=north.headers | {"If-None-Match": own[1].headers["ETag"]})
        assert tagged.status_code == 200  # not 304: that would confirm the other's tag

    def test_a_client_sees_the_progress_of_its_own_upload_only(self, trained: tuple[Api, Site, Site]) -> None:
        _, north, south = trained
        task = south.task()
        assert task.round is not None
        whole = update_body(south.plan, task.facts, 9)
        assert south.patch(task.round.id, whole[:100], 0, whole).status_code == 204
        url = f"/v1/rounds/{task.round.id}/update"
        assert north.http.head(url, headers=north.headers).headers["Upload-Offset"] == "0"
        assert south.http.head(url, headers=south.headers).headers["Upload-Offset"] == "100"
