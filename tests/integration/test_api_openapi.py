"""The description of the API: valid, complete, and in step with what the coordinator does."""

import re
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import pytest
from openapi_spec_validator import validate
from support.api import Api, new_database, open_api

from shared import __version__
from shared.plan import FederationPlan
from shared.schemas import Problem

METHODS = {"get", "put", "post", "delete", "head", "patch"}
PROBLEM = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
TENSORS = "application/vnd.safetensors"


@pytest.fixture(scope="module")
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with open_api(new_database("sqlite", request, tmp_path_factory.mktemp("openapi"))) as api:
        yield api


@pytest.fixture(scope="module")
def document(api: Api) -> dict[str, Any]:
    """As anybody gets it, without a token."""
    answer = api.call("GET", "/openapi.json", token=None)
    assert answer.status_code == 200
    return dict(answer.json())


def operations(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{method.upper()} {path}", operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if method in METHODS
    ]


def test_it_is_valid(document: dict[str, Any]) -> None:
    validate(document)
    assert document["info"]["version"] == __version__


def test_the_page_for_people_needs_no_other_host(api: Api) -> None:
    """A coordinator may have no way to the internet: scripts, styles and the icon come from itself."""
    page = api.call("GET", "/docs", token=None)
    assert (page.status_code, "'/openapi.json'" in page.text) == (200, True)
    assert "//" not in re.sub(r"<!--.*?-->", "", page.text)
    assets = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    kinds = {}
    for asset in assets:
        answer = api.call("GET", asset, token=None)
        assert (answer.status_code, len(answer.content) > 1000) == (200, True)
        kinds[asset.rpartition(".")[2]] = answer.headers["Content-Type"].partition(";")[0]
    assert kinds == {"js": "text/javascript", "css": "text/css", "png": "image/png"}
    assert api.call("GET", "/docs-assets/../app.py", token=None).status_code == 404


def test_every_operation_is_explained(document: dict[str, Any]) -> None:
    found = operations(document)
    assert len(found) > 25
    for name, operation in found:
        assert operation["summary"], name
        assert operation["description"].strip().endswith("."), name
        assert operation["tags"], name
    ids = [operation["operationId"] for _, operation in found]
    assert len(set(ids)) == len(ids)


def test_every_error_is_a_problem(document: dict[str, Any]) -> None:
    """None has FastAPI's own form of a 422, which the coordinator never sends."""
    for name, operation in operations(document):
        for status, response in operation["responses"].items():
            if int(status) >= 400:
                assert response["content"] == PROBLEM, (name, status)
                assert response["description"] == HTTPStatus(int(status)).phrase, (name, status)
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert document["components"]["schemas"]["Problem"]["properties"].keys() == Problem.model_fields.keys()


def test_which_errors_are_documented(document: dict[str, Any]) -> None:
    """Every call with a token can fail for its token, every call with parameters or a body for those."""
    for name, operation in operations(document):
        statuses = set(operation["responses"])
        if operation.get("security"):
            assert {"401", "403", "429", "503"} <= statuses, name
        if operation.get("parameters"):
            assert "422" in statuses, name
        if "requestBody" in operation:
            assert {"413", "415", "422"} <= statuses, name
        if "{" in name:
            assert "404" in statuses, name
        if TENSORS in operation["responses"].get("200", {}).get("content", {}):
            assert {"206", "304", "416"} <= statuses, name


def test_what_needs_a_token(document: dict[str, Any]) -> None:
    open_ = [name for name, operation in operations(document) if not operation.get("security")]
    assert open_ == ["GET /healthz", "GET /readyz"]
    (scheme,) = document["components"]["securitySchemes"].values()
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")


def test_bodies_of_tensors_are_binary(document: dict[str, Any]) -> None:
    """Up and down, and nothing claims to be JSON there."""
    binary = {TENSORS: {"schema": {"type": "string", "format": "binary"}}}
    down = [
        name
        for name, operation in operations(document)
        if operation["responses"].get("200", {}).get("content") == binary
    ]
    assert down == [
        "GET /v1/federations/{name}/model",
        "GET /v1/federations/{name}/personal",
        "GET /v1/rounds/{round_id}/model",
        "GET /v1/rounds/{round_id}/personal",
    ]
    up = [name for name, operation in operations(document) if operation.get("requestBody", {}).get("content") == binary]
    assert up == ["PUT /v1/rounds/{round_id}/update", "PATCH /v1/rounds/{round_id}/update"]


def test_the_example_plans_can_be_created(api: Api, document: dict[str, Any]) -> None:
    body = document["paths"]["/v1/federations"]["post"]["requestBody"]["content"]["application/json"]
    examples = [example["value"] for example in body["examples"].values()]
    assert examples
    for example in examples:
        plan = FederationPlan.model_validate(example)
        for field in example:
            assert field in FederationPlan.model_fields
        small = example | {"model": {"backbone": "lenet"}}  # the example's network takes its time to be built
        created = api.admin("POST", "/v1/federations", json=small)
        assert created["plan"]["rounds"] == plan.rounds.model_dump(mode="json")


def test_other_examples(document: dict[str, Any]) -> None:
    problem = document["components"]["schemas"]["Problem"]["example"]
    assert Problem.model_validate(problem).model_dump(exclude_none=True) == problem
    join = document["components"]["schemas"]["JoinRequest"]["properties"]
    assert join["name"]["examples"]
    assert join["class_counts"]["examples"]
