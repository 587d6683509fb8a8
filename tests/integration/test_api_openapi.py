"""The OpenAPI document is valid, complete, and matches what the coordinator does."""

import re
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import validate
from support.agent_service import Service
from support.api import Api, open_api
from support.databases import new_database

from client_agent.settings import ServeOptions
from shared import __version__
from shared.contract.messages import Problem
from shared.contract.plan import FederationPlan

METHODS = {"get", "put", "post", "delete", "head", "patch"}
PROBLEM = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
TENSORS, ANY_BYTES = "application/vnd.safetensors", "application/octet-stream"


@pytest.fixture(scope="module")
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with open_api(new_database("sqlite", request, tmp_path_factory.mktemp("openapi"))) as api:
        yield api


@pytest.fixture(scope="module")
def document(api: Api) -> dict[str, Any]:
    """Fetch the document without a token."""
    answer = api.call("GET", "/openapi.json", token=None)
    assert answer.status_code == 200
    return dict(answer.json())


@pytest.fixture(scope="module")
def agents_document() -> dict[str, Any]:
    service = Service(ServeOptions(), None)
    service.queue.stop()
    return dict(service.http.get("/openapi.json").json())


@pytest.fixture(scope="module")
def both(document: dict[str, Any], agents_document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return every operation of both programs with its method and path."""
    return [*operations(document), *operations(agents_document)]


def operations(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{method.upper()} {path}", operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if method in METHODS
    ]


def test_the_document_is_valid(document: dict[str, Any]) -> None:
    validate(document)
    assert document["info"]["version"] == __version__


def test_the_docs_page_needs_no_other_host(api: Api) -> None:
    """A coordinator may have no internet access, so it serves scripts, styles and the icon itself."""
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


def test_every_operation_has_a_summary_and_description(document: dict[str, Any]) -> None:
    found = operations(document)
    assert len(found) > 25
    for name, operation in found:
        assert operation["summary"], name
        assert operation["description"].strip().endswith("."), name
        assert operation["tags"], name
    ids = [operation["operationId"] for _, operation in found]
    assert len(set(ids)) == len(ids)


def test_operation_ids_read_like_functions(document: dict[str, Any], agents_document: dict[str, Any]) -> None:
    """A verb and a noun in camel case: generated clients use them as function names."""
    for described in (document, agents_document):
        ids = [operation["operationId"] for _, operation in operations(described)]
        assert len(set(ids)) == len(ids)
        assert [one for one in ids if not re.fullmatch(r"[a-z]+([A-Z][a-z]*)+", one)] == []
    assert document["paths"]["/v1/federations"]["post"]["operationId"] == "createFederation"


def test_every_operation_is_described_in_full(
    document: dict[str, Any], agents_document: dict[str, Any], both: list[tuple[str, dict[str, Any]]]
) -> None:
    """With described tags, a server, a contact, and whether a token is needed; for both programs."""
    validate(agents_document)
    for described in (document, agents_document):
        assert described["servers"] == [{"url": "/"}]
        assert described["info"]["contact"]["name"].startswith("The operator of this")
        tags = {tag["name"] for tag in described["tags"] if tag["description"]}
        assert {tag for _, operation in operations(described) for tag in operation["tags"]} == tags
        assert "HTTPValidationError" not in described["components"]["schemas"]
    for name, operation in both:
        assert len(operation["tags"]) >= 1, name
        assert operation["summary"], name
        assert operation["description"].strip().endswith("."), name
        assert "security" in operation, name
        assert {"400", "500"} <= set(operation["responses"]), name


def test_response_headers_are_documented(both: list[tuple[str, dict[str, Any]]], document: dict[str, Any]) -> None:
    """Every response has a request id, 429 and 503 have Retry-After, and HEAD has no body."""
    for name, operation in both:
        for status, response in operation["responses"].items():
            found = set(response["headers"])
            assert "X-Request-ID" in found, (name, status)
            assert status not in ("429", "503", "507") or "Retry-After" in found, (name, status)
            assert status != "401" or "WWW-Authenticate" in found, (name, status)
            if name.startswith("HEAD"):
                assert "content" not in response, (name, status)
        if "206" in operation["responses"]:
            assert {"ETag", "Repr-Digest", "Accept-Ranges"} <= set(operation["responses"]["200"]["headers"]), name
            assert "Content-Range" in operation["responses"]["206"]["headers"], name
            sent = {parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "header"}
            assert sent == {"Range", "If-Range", "If-None-Match"}, name
    update = document["paths"]["/v1/rounds/{round_id}/update"]
    progress = {"Upload-Offset", "Upload-Complete", "Upload-Length", "Upload-Limit"}
    for method, status in (("head", "200"), ("patch", "200"), ("patch", "204"), ("post", "201")):
        assert progress <= set(update[method]["responses"][status]["headers"]), method
    assert "Location" in update["post"]["responses"]["201"]["headers"]
    sent = {parameter["name"] for parameter in update["patch"]["parameters"]}
    assert sent == {"round_id", "upload", "upload-offset", "upload-complete", "upload-length", "repr-digest"}


def test_every_documented_head_call_is_served(document: dict[str, Any], api: Api) -> None:
    described = {name for name, _ in operations(document) if name.startswith("HEAD")}
    assert len(described) == 4
    for name in described:
        path = name.removeprefix("HEAD ").replace("{name}", "x").replace("{round_id}", "1")
        assert "HEAD" in api.call("TRACE", path).headers["Allow"]


def test_the_format_of_an_update_is_described(document: dict[str, Any]) -> None:
    text = document["paths"]["/v1/rounds/{round_id}/update"]["put"]["description"]
    for word in ("`shared.`", "`personal.`", "`report`", "TrainingReport"):
        assert word in text
    assert "TrainingReport" in document["components"]["schemas"]


def test_a_plan_sent_by_a_generated_client_leaves_the_rest_to_the_preset(document: dict[str, Any]) -> None:
    """Generators send the schema's defaults, and cannot express defaults that are objects."""
    schemas = document["components"]["schemas"]
    for name in ("FederationPlan", "ModelPlan", "TrainingPlan", "DistransOptions", "GeneratorOptions"):
        defaults = [key for key, field in schemas[name]["properties"].items() if "default" in field]
        assert defaults == (["preset"] if name == "FederationPlan" else []), name
    assert "Default: 0.3" in schemas["DistransOptions"]["properties"]["alpha"]["description"]
    assert schemas["DistransOptions"]["required"] == ["name"]


def test_every_problem_of_predict_is_documented(agents_document: dict[str, Any]) -> None:
    """Everything docs/predict-api.md lists, each as a problem."""
    responses = agents_document["paths"]["/predict"]["post"]["responses"]
    page = (Path(__file__).parents[2] / "docs" / "predict-api.md").read_text()
    listed = set(re.findall(r"^\| (\d{3}) \|", page, re.MULTILINE))
    assert set(responses) == listed | {"200"}
    for status in listed:
        assert responses[status]["content"] == PROBLEM, status


def test_every_error_is_a_problem(document: dict[str, Any]) -> None:
    """None has FastAPI's form of a 422, which the coordinator never sends."""
    for name, operation in operations(document):
        for status, response in operation["responses"].items():
            if int(status) >= 400:
                assert response.get("content") == (None if name.startswith("HEAD") else PROBLEM), (name, status)
                assert response["description"] == HTTPStatus(int(status)).phrase, (name, status)
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert document["components"]["schemas"]["Problem"]["properties"].keys() == Problem.model_fields.keys()


def test_errors_of_tokens_parameters_and_bodies_are_documented(document: dict[str, Any]) -> None:
    """A call with a token can fail because of the token; the same goes for parameters and bodies."""
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


def test_only_health_checks_need_no_token(document: dict[str, Any]) -> None:
    open_ = [name for name, operation in operations(document) if not operation.get("security")]
    assert open_ == ["GET /healthz", "GET /readyz"]
    (scheme,) = document["components"]["securitySchemes"].values()
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")


def test_tensor_bodies_are_binary(document: dict[str, Any]) -> None:
    """In both directions; none claims to be JSON."""
    binary = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in (TENSORS, ANY_BYTES)}
    down = [
        name
        for name, operation in operations(document)
        if operation["responses"].get("200", {}).get("content") == binary
    ]
    assert down == [
        "GET /v1/federations/{name}/model",
        "GET /v1/federations/{name}/personal",
        "GET /v1/rounds/{round_id}/personal",
    ]
    up = {
        name: operation["requestBody"]["content"]
        for name, operation in operations(document)
        if "update" in name and "requestBody" in operation
    }
    part = binary | {"application/partial-upload": binary[TENSORS]}
    path = "/v1/rounds/{round_id}/update"
    assert up == {f"PUT {path}": binary, f"POST {path}": part, f"PATCH {path}": part}


def test_the_example_plans_can_be_created(api: Api, document: dict[str, Any]) -> None:
    body = document["paths"]["/v1/federations"]["post"]["requestBody"]["content"]["application/json"]
    examples = [example["value"] for example in body["examples"].values()]
    assert examples
    for example in examples:
        plan = FederationPlan.model_validate(example)
        for field in example:
            assert field in FederationPlan.model_fields
        small = example | {"model": {"backbone": "lenet"}}  # the example's network takes long to build
        created = api.admin("POST", "/v1/federations", json=small)
        assert created["plan"]["rounds"] == plan.rounds.model_dump(mode="json")


def test_the_other_examples_are_valid(document: dict[str, Any]) -> None:
    problem = document["components"]["schemas"]["Problem"]["example"]
    assert Problem.model_validate(problem).model_dump(exclude_none=True) == problem
    join = document["components"]["schemas"]["JoinRequest"]["properties"]
    assert join["name"]["examples"]
    assert join["class_counts"]["examples"]
