"""Generates docs/plan-reference.md from the plan's definition."""

import sys
import types
import typing
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from shared.contract.method_options import (
    AdvPropOptions,
    DistransOptions,
    FedAvgOptions,
    FedAwSOptions,
    GeneratorOptions,
    MixupOptions,
    MoonOptions,
    PFedHNOptions,
    PFedHNPCOptions,
    PFedMeOptions,
)
from shared.contract.plan import FederationPlan, ImagePlan, ModelPlan, RoundsPlan, TrainingPlan
from shared.contract.presets import DEFAULT_PRESET, PRESETS, flatten

_HEADER = """\
# Plan reference

Every setting of a federation's plan. `distrans-server federation create --example` prints a commented plan.
This page is generated from the code: `python -m lab.plan_reference > docs/plan-reference.md`.
"""
_PRESETS = """
## Presets

A preset replaces defaults below. The plan's own settings override it, and a preset's method settings apply only to
that method.

| preset | sets |
|---|---|
"""
_COLUMNS = "| key | type | default | meaning |\n|---|---|---|---|\n"
_TABLES: tuple[tuple[str, type[BaseModel]], ...] = (
    ("Top level", FederationPlan),
    ("[image]", ImagePlan),
    ("[model]", ModelPlan),
    ('[method] with name = "distrans"', DistransOptions),
    ("[method.generator]", GeneratorOptions),
    ('[method] with name = "fedavg"', FedAvgOptions),
    ('[method] with name = "pfedme"', PFedMeOptions),
    ('[method] with name = "pfedhn"', PFedHNOptions),
    ('[method] with name = "pfedhn-pc"', PFedHNPCOptions),
    ('[method] with name = "moon"', MoonOptions),
    ('[method] with name = "fedaws"', FedAwSOptions),
    ('[method] with name = "mixup"', MixupOptions),
    ('[method] with name = "advprop"', AdvPropOptions),
    ("[training]", TrainingPlan),
    ("[rounds]", RoundsPlan),
)


def reference() -> str:
    """Return the page."""
    parts = [_HEADER, _PRESETS]
    for preset, tables in PRESETS.items():
        settings = ", ".join(f"`{key} = {_toml(value)}`" for key, value in flatten(tables))
        parts.append(f"| `{preset}`{' (default)' if preset == DEFAULT_PRESET else ''} | {settings} |\n")
    for heading, table in _TABLES:
        parts.append(f"\n## {heading}\n\n{(table.__doc__ or '').strip()}\n\n{_COLUMNS}")
        for name, field in table.model_fields.items():
            default = field.get_default()
            if isinstance(default, BaseModel):
                continue  # has its own section
            shown = (
                "required" if default is PydanticUndefined else "unset" if default is None else f"`{_toml(default)}`"
            )
            parts.append(
                f"| `{name}` | {_kind(field.annotation)}{_bounds(field)} | {shown} | {field.description or ''} |\n"
            )
    return "".join(parts)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def _kind(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f'`"{item}"`' for item in arguments)
    if origin in (typing.Union, types.UnionType):
        return _kind(next(item for item in arguments if item is not type(None)))
    if origin is typing.Annotated:
        return _kind(arguments[0])
    if origin is tuple:
        return f"list of {_kind(arguments[0])}s"
    return {int: "integer", float: "number", str: "string", bool: "true or false"}.get(annotation, "table")


def _bounds(field: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [
        f"{sign} {getattr(rule, key):g}"
        for rule in field.metadata
        for key, sign in signs.items()
        if getattr(rule, key, None) is not None
    ]
    return f" {', '.join(found)}" if found else ""


if __name__ == "__main__":
    sys.stdout.write(reference())
