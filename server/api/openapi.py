"""The parts of the OpenAPI document that are specific to the coordinator."""

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

from shared.contract import versions
from shared.http import openapi

DESCRIPTION = """The coordinator of DisTrans federations.

Operators create federations and invite sites; agents poll `/v1/task`, train and upload. Send tokens as
`Authorization: Bearer TOKEN`. Errors are `application/problem+json` with a stable `code`. Tensors are safetensors
files, sent as `application/vnd.safetensors`, or as `application/octet-stream` to callers that accept nothing else."""

TAGS = [
    {"name": "federations", "description": "Create, control and inspect federations; clients read their own data."},
    {"name": "clients", "description": "Join with an invite; manage a client's own record."},
    {"name": "rounds", "description": "An agent's calls in a round: task, model, update, evaluation."},
    {"name": "operations", "description": "Health, Prometheus metrics, and the audit log."},
]
CONTACT = {"name": "The operator of this coordinator"}
_PLAN = "FederationPlan"
_REF = "#/components/schemas/"


def install(app: FastAPI) -> None:
    """Complete the application's OpenAPI document."""
    openapi.install(app, anywhere=(400, 429, 500), always=(versions.HEADER,), complete=_describe_plan)


def _describe_plan(document: dict[str, Any]) -> None:
    """Move defaults into the descriptions: generated clients would send them and so override the preset."""
    schemas = document["components"]["schemas"]
    for name in set(_reached(schemas, _PLAN)):
        table = schemas[name]
        for key, field in table["properties"].items():
            if "const" in field:  # the method's name, which discriminates the union
                table["required"] = [*table.get("required", []), key]
                del field["default"]
            elif key != "preset" and (default := field.pop("default", None)) is not None:
                text = field.get("description", "")
                field["description"] = f"{text} Default: {default}, unless the preset sets another value.".strip()


def _reached(schemas: dict[str, Any], name: str) -> Iterator[str]:
    yield name
    for reference in _references(schemas[name]["properties"]):
        yield from _reached(schemas, reference.removeprefix(_REF))


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)
