"""Readable messages for pydantic's errors: what the value must be, and what it is.

`describe_error` covers every error that plans, experiments, REST bodies and parameters can cause.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import isclass
from typing import Any, get_args

from pydantic import BaseModel

from shared.contract.patterns import (
    ATTEMPT_PATTERN,
    DIGEST_PATTERN,
    NAME_PATTERN,
    ONE_LINE_PATTERN,
    PRINTABLE_PATTERN,
)
from shared.contract.suggestions import near_match

MESSAGE = "message"  # key in an error's context for a message that is already readable
_PATTERNS = {
    NAME_PATTERN: "must be 1 to 64 letters, digits, dots, dashes and underscores, starting with a letter or digit",
    PRINTABLE_PATTERN: "must contain only printable ASCII characters",
    DIGEST_PATTERN: "must be 64 lowercase hexadecimal digits",
    ATTEMPT_PATTERN: "must be 32 lowercase hexadecimal digits",
    ONE_LINE_PATTERN: "must not contain line breaks or other control characters",
}
_MAX_SHOWN = 60  # characters of a value
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "list": "a list",
    "dict": "a table",
    "mapping": "a table",
    "model": "a table",
    "dataclass": "a table",
}


def describe_error(error: Mapping[str, Any], model: type[BaseModel] | None = None) -> str:
    """Return what is wrong with a field, without the field's name. `model` is the validated model, for suggestions."""
    context: Mapping[str, Any] = error.get("ctx") or {}
    if MESSAGE in context:
        return str(context[MESSAGE])
    kind, value = str(error["type"]), error.get("input")
    if kind == "extra_forbidden":
        return _unknown(error["loc"], model)
    if kind in ("literal_error", "enum"):
        return _one_of(re.findall(r"'([^']*)'", str(context["expected"])), value)
    if kind == "union_tag_invalid":
        return _one_of(re.findall(r"'([^']*)'", str(context["expected_tags"])), context["tag"])
    if kind == "string_pattern_mismatch":
        wanted = _PATTERNS.get(str(context["pattern"]), f"must match {context['pattern']}")
        return f"{wanted}, but is {_shown(value)}"
    if kind in _SENTENCES:
        return _SENTENCES[kind](context, value)
    if "error" in context and kind in ("value_error", "assertion_error"):
        return str(context["error"])
    wanted = _KINDS.get(kind.partition("_")[0], "")
    return f"must be {wanted}, but is {_shown(value)}" if wanted else f"cannot be used: {_shown(value)}"


_SENTENCES: dict[str, Callable[[Mapping[str, Any], Any], str]] = {
    "missing": lambda _context, _value: "is missing",
    "missing_argument": lambda _context, _value: "is missing",
    "union_tag_not_found": lambda context, _value: f"has no {str(context['discriminator']).strip(chr(39))}",
    "greater_than_equal": lambda context, value: f"must be at least {_number(context['ge'])}, but is {_shown(value)}",
    "greater_than": lambda context, value: f"must be greater than {_number(context['gt'])}, but is {_shown(value)}",
    "less_than_equal": lambda context, value: f"must be at most {_number(context['le'])}, but is {_shown(value)}",
    "less_than": lambda context, value: f"must be less than {_number(context['lt'])}, but is {_shown(value)}",
    "int_parsing_size": lambda _context, value: f"is too large: {_shown(value)}",
    "string_unicode": lambda _context, _value: "is not valid Unicode",
    "string_too_short": lambda context, value: f"must have at least {_some(context, 'min')}, but has {len(value)}",
    "string_too_long": lambda context, value: f"must have at most {_some(context, 'max')}, but has {len(value)}",
    "too_short": lambda context, _value: (
        f"must have at least {_counted(context['min_length'], 'entry', 'entries')}, but has {context['actual_length']}"
    ),
    "too_long": lambda context, _value: (
        f"must have at most {_counted(context['max_length'], 'entry', 'entries')}, "
        f"but has {context['actual_length'] or 'more'}"
    ),
    "json_invalid": lambda context, _value: f"is not valid JSON: {context['error']}",
}


def _number(limit: Any) -> str:
    return str(int(limit)) if isinstance(limit, float) and limit.is_integer() and abs(limit) < 1e15 else str(limit)


def _some(context: Mapping[str, Any], which: str) -> str:
    return _counted(context[f"{which}_length"], "character", "characters")


def _counted(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _one_of(options: Sequence[str], value: Any) -> str:
    near = near_match(value, options) if isinstance(value, str) else None
    if near is not None:
        return f"unknown value {_shown(value)}; did you mean {near!r}? Valid values: {', '.join(options)}"
    return f"must be one of {', '.join(options)}, but is {_shown(value)}"


def _shown(value: Any) -> str:
    """Return the value as written in a plan, shortened if long."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "empty"
    if isinstance(value, int) and abs(value) >= 10**_MAX_SHOWN:  # Python refuses to format very long ones
        return f"a number with more than {_MAX_SHOWN} digits"
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple | set):
        return "a list"
    text = repr(value[: _MAX_SHOWN + 1]) if isinstance(value, str) else str(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"


def _unknown(path: Sequence[str | int], model: type[BaseModel] | None) -> str:
    """Suggest a similar setting in the same table, or a setting of the same name in another table."""
    *place, name = (str(part) for part in path)
    table = _table_at(model, place) if model is not None else None
    if model is None or table is None:
        return "unknown setting"
    if near := near_match(name, table.model_fields):
        return f"unknown setting; did you mean {near}?"
    elsewhere = [dotted for dotted in _settings(model, place) if dotted.rpartition(".")[2] == name]
    if elsewhere:
        return f"unknown setting; did you mean {' or '.join(elsewhere[:3])}?"
    return f"unknown setting; valid settings here: {', '.join(table.model_fields)}"


def _tables(annotation: Any) -> list[type[BaseModel]]:
    return [kind for kind in (annotation, *get_args(annotation)) if isclass(kind) and issubclass(kind, BaseModel)]


def _table_at(model: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    """Return the table at an error's path, in which a method's name selects one of the method tables."""
    tables = [model]
    for part in path:
        if len(tables) > 1:
            tables = [table for table in tables if table.model_fields["name"].default == part]
        elif tables and part in tables[0].model_fields:
            tables = _tables(tables[0].model_fields[part].annotation)
        else:
            return None
    return tables[0] if len(tables) == 1 else None


def _settings(model: type[BaseModel], place: Sequence[str]) -> Iterator[str]:
    """Yield all settings' dotted names; method settings only of the method that contains the error."""
    for name, field in model.model_fields.items():
        yield name
        tables = _tables(field.annotation)
        if len(tables) == 1:
            yield from (f"{name}.{setting}" for setting in _settings(tables[0], ()))
        elif len(place) > 1 and place[0] == name and (chosen := _table_at(model, place[:2])):
            yield from (f"{name}.{setting}" for setting in _settings(chosen, ()))
