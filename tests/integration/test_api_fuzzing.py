"""schemathesis calls the whole API, with every kind of token and without: every response is documented."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from support.api import Api, open_api
from support.coordinator import ADMIN_TOKEN
from support.databases import new_database
from support.plans import small_plan

from server.http.rate_limits import FailureThrottle
from shared.contract.messages import Problem

EXAMPLES = 4  # per operation, mode and caller
PLAN = small_plan(method={"name": "fedavg"}, rounds={"count": 1, "min_clients": 1})
CALLERS = ("nobody", "invited", "client", "admin")  # the admin last: it may cancel the federation
LAST = ("delete /v1/me", "post /v1/federations/{name}/cancel")
UNDOCUMENTED = {
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.METHOD_NOT_ALLOWED,
}  # for paths that match no route

schemathesis.serializer.alias("application/vnd.safetensors", "application/octet-stream")


@dataclass(frozen=True)
class Fuzzed:
    """A coordinator, its OpenAPI document, and a token for every caller."""

    api: Api
    operations: list[Any]
    tokens: dict[str, str | None]


@pytest.fixture(scope="module")
def fuzzed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    with open_api(new_database("sqlite", request, tmp_path_factory.mktemp("fuzzing")), requests_per_s=0) as api:
        api.app.state.throttle = FailureThrottle(free_failures=1_000_000)  # otherwise it would reject most calls
        api.create(PLAN)
        schema = schemathesis.openapi.from_dict(api.call("GET", "/openapi.json").json())
        operations = sorted((found.ok() for found in schema.get_all_operations()), key=_place)
        tokens = {
            "nobody": None,
            "invited": api.admin("POST", "/v1/federations/pets/invites")["token"],
            "client": api.join(PLAN, "left", {"cat": 1}).token,
            "admin": ADMIN_TOKEN,
        }
        yield Fuzzed(api, operations, tokens)


def _place(operation: Any) -> tuple[bool, str]:
    return operation.label.lower() in LAST, operation.label


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("caller", CALLERS)
def test_generated_calls_get_only_documented_answers(fuzzed: Fuzzed, caller: str, mode: GenerationMode) -> None:
    answered: set[HTTPStatus] = set()
    for operation in fuzzed.operations:

        @settings(
            max_examples=EXAMPLES, phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def examples(case: Case) -> None:
            _aim(case, mode)
            answered.add(_call(fuzzed, case, fuzzed.tokens[caller]))

        with suppress(Unsatisfiable):  # a call without parameters has no invalid values
            examples()
    assert HTTPStatus.OK in answered or mode is GenerationMode.NEGATIVE, "health is for everybody"
    refused = HTTPStatus.UNAUTHORIZED if caller in ("nobody", "invited") else HTTPStatus.FORBIDDEN
    assert refused in answered


def _aim(case: Case, mode: GenerationMode) -> None:
    """Point valid calls at things that exist, and avoid calls that only take time."""
    if case.operation.label == "GET /v1/task":
        case.query = {**(case.query or {}), "wait": 0}
    if mode is not GenerationMode.POSITIVE:
        return
    for name, value in {"name": PLAN.name, "client": "left", "round_id": 1, "number": 0}.items():
        if name in (case.path_parameters or {}):
            case.path_parameters[name] = value
    if case.operation.label == "POST /v1/federations" and isinstance(case.body, dict):
        case.body |= {"model": {"backbone": "lenet"}, "image": {"channels": 1, "height": 14, "width": 14}}


def _call(fuzzed: Fuzzed, case: Case, token: str | None) -> HTTPStatus:
    sent = case.as_transport_kwargs(base_url="http://testserver")
    headers = {name: str(value) for name, value in sent.pop("headers", {}).items() if str(value).isascii()}
    headers.pop("Authorization", None)
    known = {name: sent[name] for name in ("params", "json", "data", "files") if sent.get(name) is not None}
    if isinstance(known.get("data"), (bytes, str)):
        known["content"] = known.pop("data")
    answer = fuzzed.api.call(sent["method"], sent["url"], token, headers=headers, **known)
    where = f"{case.as_curl_command()}\n{answer.status_code} {answer.text[:500]}"
    status = HTTPStatus(answer.status_code)
    assert status < 500, where
    assert str(status.value) in case.operation.definition.raw["responses"] or status in UNDOCUMENTED, where
    if status >= 400 and sent["method"] != "HEAD":
        assert answer.headers["content-type"] == "application/problem+json", where
        assert Problem.model_validate(answer.json()).status == status, where
    return status
