"""A plan as a form: one field per setting, taken from the plan's own definition, so that none is forgotten.

Fields are named like the settings, such as `rounds.count`. Empty ones take the preset's value. A method's settings
differ from method to method and are given as in the plan's file.
"""

import re
import tomllib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from shared.contract.error_collection import field_path
from shared.contract.error_messages import describe_error
from shared.contract.method_options import METHOD_NAMES
from shared.contract.plan import FederationPlan, describe_toml_error
from shared.contract.presets import DEFAULT_PRESET, PRESETS, apply_preset, flatten

METHOD_SETTINGS = "method settings"
_TABLES = ("image", "model", "training", "rounds")
_LABELS = {"lr": "Learning rate", "std": "Standard deviation", "dense_dim": "Dense width", "count": "Number of rounds"}
_MOST_SHOWN = 60  # characters of a default


@dataclass(frozen=True)
class Setting:
    """A setting of the plan as a field of the form."""

    name: str
    label: str
    help: str
    kind: Literal["text", "select", "number"]
    choices: tuple[str, ...] = ()
    default: str = ""  # what an empty field means


def settings_of(preset: str) -> dict[str, list[Setting]]:
    """Return the settings by table, with the preset's defaults."""
    chosen = dict(flatten(apply_preset({"preset": preset})))
    found = {"plan": [_setting("", name, FederationPlan.model_fields[name], chosen) for name in ("seed", "averaging")]}
    for table in _TABLES:
        fields = FederationPlan.model_fields[table].annotation
        found[table] = [_setting(table, name, one, chosen) for name, one in fields.model_fields.items()]  # type: ignore[union-attr]
    return found


def _setting(table: str, name: str, field: FieldInfo, chosen: Mapping[str, Any]) -> Setting:
    dotted = f"{table}.{name}" if table else name
    choices = tuple(
        str(one) for part in _parts(field.annotation) if get_origin(part) is Literal for one in get_args(part)
    )
    choices = tuple(choice for choice in choices if (dotted, choice) != ("model.weights", "file"))  # needs an upload
    is_number = any(part in (int, float) for part in _parts(field.annotation))
    return Setting(
        name=dotted,
        label=_LABELS.get(name, re.sub(r"_s$", " (seconds)", name).replace("_", " ").capitalize()),
        help=field.description or "",
        kind="select" if choices else "number" if is_number else "text",
        choices=choices,
        default=_shown(chosen.get(dotted, field.default)),
    )


def _parts(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) in (Union, types.UnionType):
        yield from get_args(annotation)
    else:
        yield annotation


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    text = ", ".join(f"{one:g}" for one in value) if isinstance(value, tuple | list) else str(value)
    return text[:_MOST_SHOWN]


def read_form(fields: Mapping[str, str]) -> tuple[FederationPlan | None, dict[str, list[str]]]:
    """Return the plan of a form, or None and what is wrong, by field; under "" what concerns no single one."""
    errors: dict[str, list[str]] = {}
    data: dict[str, Any] = {
        "name": fields.get("name", "").strip(),
        "preset": fields.get("preset") or DEFAULT_PRESET,
        "classes": [line.strip() for line in fields.get("classes", "").splitlines() if line.strip()],
    }
    known = {setting.name: setting for group in settings_of(DEFAULT_PRESET).values() for setting in group}
    for name, setting in known.items():
        if text := fields.get(name, "").strip():
            table, _, key = name.rpartition(".")
            (data.setdefault(table, {}) if table else data)[key] = _value(setting, text)
    method = _method(fields, errors)
    if method:
        data["method"] = method
    try:
        plan = FederationPlan.model_validate(data)
    except ValidationError as error:
        for one in error.errors(include_url=False):
            name, message = _place(".".join(field_path(one)), describe_error(one), known)
            errors.setdefault(name, []).append(message)
        return None, errors
    return (None, errors) if errors else (plan, {})


def _value(setting: Setting, text: str) -> Any:
    """Return the text as the setting's type; what does not fit stays text, which the plan then rejects with reason."""
    if setting.name in ("image.mean", "image.std"):
        return [_number(part) for part in text.split(",")]
    return _number(text) if setting.kind == "number" else text


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip()


def _method(fields: Mapping[str, str], errors: dict[str, list[str]]) -> dict[str, Any]:
    try:
        settings = tomllib.loads(fields.get(METHOD_SETTINGS, ""))
    except (ValueError, RecursionError) as error:
        errors[METHOD_SETTINGS] = [f"is not valid TOML: {describe_toml_error(error)}"]
        settings = {}
    name = fields.get("method", "")
    return {"name": name, **settings} if name in METHOD_NAMES else settings


def _place(path: str, message: str, known: Mapping[str, Setting]) -> tuple[str, str]:
    """Return the field to show an error at. Settings that contradict each other name the first one themselves."""
    first, separator, rest = message.partition(": ")
    if path not in known and separator and first in known:
        return first, rest
    table = path.partition(".")[0]
    if path in known or path in ("name", "preset"):
        return path, message
    if table == "classes":
        return "classes", message
    if table == "method":
        return METHOD_SETTINGS, f"{path.partition('.')[2]}: {message}".removeprefix(": ")
    dotted = f"{path.rpartition('.')[0]}"
    return (dotted, message) if dotted in known else ("", f"{path}: {message}".removeprefix(": "))


def preset_names() -> list[str]:
    """Return the presets, the default first."""
    return sorted(PRESETS, key=lambda name: (name != DEFAULT_PRESET, list(PRESETS).index(name)))
