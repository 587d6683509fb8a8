"""The coordinator's OpenAPI document: what is about this service alone."""

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

from shared import versions
from shared.http import openapi

DESCRIPTION = """The coordinator of DisTrans federations.

Operators create federations and invite sites; agents poll `/v1/task`, train and upload. Send tokens as
`Authorization: Bearer TOKEN`. Errors are `application/problem+json` with a stable `code`. Tensors are safetensors
files, sent as `application/vnd.safetensors` or, to callers that accept only that, as `application/octet-stream`."""

TAGS = [
    {"name": "federations", "description": "What operators create, steer and read; sites read what is theirs."},
    {"name": "clients", "description": "Joining with an invite, and a client's own record."},
    {"name": "rounds", "description": "What an agent calls in a round: its task, models, its update, its scores."},
    {"name": "operations", "description": "Health, figures for Prometheus, and the audit log."},
]
CONTACT = {"name": "The operator of this coordinator"}
_PLAN = "FederationPlan"
_REF = "#/components/schemas/"


def install(app: FastAPI) -> None:
    """Complete the document."""
    openapi.install(app, anywhere=(400, 429, 500), always=(versions.HEADER,), complete=_describe_plan)


def _describe_plan(document: dict[str, Any]) -> None:
    """Put defaults into the text: a generated client would send them with each plan, and override the preset's."""
    schemas = document["components"]["schemas"]
    for name in set(_reached(schemas, _PLAN)):
        table = schemas[name]
        for key, field in table["properties"].items():
            if "const" in field:  # the name of a method, by which the union's readers tell its members apart
                table["required"] = [*table.get("required", []), key]
                del field["default"]
            elif key != "preset" and (default := field.pop("default", None)) is not None:
                text = field.get("description", "")
                field["description"] = f"{text} Default: {default}, unless the preset says otherwise.".strip()


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
