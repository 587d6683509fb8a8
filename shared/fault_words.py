"""pydantic's faults in this project's words: what the value must be, and what it is.

`in_words` covers every type of fault that plans, experiments and the bodies and parameters of the REST API can have.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import isclass
from typing import Any, get_args

from pydantic import BaseModel

from shared.near_match import near_match

WORDS = "words"  # in the context of a fault that is in our words already
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
PRINTABLE_PATTERN = r"^[\x20-\x7e]*$"
DIGEST_PATTERN = r"^[0-9a-f]{64}$"
ATTEMPT_PATTERN = r"^[0-9a-f]{32}$"
ONE_LINE_PATTERN = r"^[^\x00-\x1f\x7f]*$"
_PATTERNS = {
    NAME_PATTERN: "must have 1 to 64 letters, digits, dots, dashes and underscores, the first a letter or digit",
    PRINTABLE_PATTERN: "may hold printable ASCII characters only",
    DIGEST_PATTERN: "must be 64 hexadecimal digits in lower case",
    ATTEMPT_PATTERN: "must be 32 hexadecimal digits in lower case",
    ONE_LINE_PATTERN: "must not hold line breaks or other control characters",
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


def in_words(fault: Mapping[str, Any], model: type[BaseModel] | None = None) -> str:
    """What is wrong, to follow the field's name and a colon. `model` is what was validated, to suggest its fields."""
    context: Mapping[str, Any] = fault.get("ctx") or {}
    if WORDS in context:
        return str(context[WORDS])
    kind, value = str(fault["type"]), fault.get("input")
    if kind == "extra_forbidden":
        return _unknown(fault["loc"], model)
    if kind in ("literal_error", "enum"):
        return _one_of(re.findall(r"'([^']*)'", str(context["expected"])), value)
    if kind == "union_tag_invalid":
        return _one_of(re.findall(r"'([^']*)'", str(context["expected_tags"])), context["tag"])
    if kind == "string_pattern_mismatch":
        wanted = _PATTERNS.get(str(context["pattern"]), "does not have the expected form")
        return f"{wanted}; it is {_shown(value)}"
    if kind in _SENTENCES:
        return _SENTENCES[kind](context, value)
    if "error" in context and kind in ("value_error", "assertion_error"):
        return str(context["error"])
    wanted = _KINDS.get(kind.partition("_")[0], "")
    return f"must be {wanted}, but is {_shown(value)}" if wanted else f"cannot be used: {_shown(value)}"


_SENTENCES: dict[str, Callable[[Mapping[str, Any], Any], str]] = {
    "missing": lambda _context, _value: "is missing",
    "missing_argument": lambda _context, _value: "is missing",
    "union_tag_not_found": lambda context, _value: f"lacks its {str(context['discriminator']).strip(chr(39))}",
    "greater_than_equal": lambda context, value: f"must be at least {_number(context['ge'])}, but is {_shown(value)}",
    "greater_than": lambda context, value: f"must be greater than {_number(context['gt'])}, but is {_shown(value)}",
    "less_than_equal": lambda context, value: f"must be at most {_number(context['le'])}, but is {_shown(value)}",
    "less_than": lambda context, value: f"must be less than {_number(context['lt'])}, but is {_shown(value)}",
    "int_parsing_size": lambda _context, value: f"is too large a number: {_shown(value)}",
    "string_unicode": lambda _context, _value: "is not proper Unicode",
    "string_too_short": lambda context, value: f"must have at least {_some(context, 'min')}, but has {len(value)}",
    "string_too_long": lambda context, value: f"may have at most {_some(context, 'max')}, but has {len(value)}",
    "too_short": lambda context, _value: (
        f"must have at least {_counted(context['min_length'], 'entry', 'entries')}, but has {context['actual_length']}"
    ),
    "too_long": lambda context, _value: (
        f"may have at most {_counted(context['max_length'], 'entry', 'entries')}, "
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
        return f"unknown value {_shown(value)}; did you mean {near!r}? Possible: {', '.join(options)}"
    return f"must be one of {', '.join(options)}, but is {_shown(value)}"


def _shown(value: Any) -> str:
    """A value as a person would write it in a plan; of a long one the start."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "empty"
    if isinstance(value, int) and abs(value) >= 10**_MAX_SHOWN:  # Python refuses to write very long ones
        return f"a number of more than {_MAX_SHOWN} digits"
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple | set):
        return "a list"
    text = repr(value[: _MAX_SHOWN + 1]) if isinstance(value, str) else str(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"


def _unknown(path: Sequence[str | int], model: type[BaseModel] | None) -> str:
    """The nearest setting of the same table, or the one of this name in another table."""
    *place, name = (str(part) for part in path)
    table = _table_at(model, place) if model is not None else None
    if model is None or table is None:
        return "unknown setting"
    if near := near_match(name, table.model_fields):
        return f"unknown setting; did you mean {near}?"
    elsewhere = [dotted for dotted in _settings(model, place) if dotted.rpartition(".")[2] == name]
    if elsewhere:
        return f"unknown setting; did you mean {' or '.join(elsewhere[:3])}?"
    return f"unknown setting; known here: {', '.join(table.model_fields)}"


def _tables(annotation: Any) -> list[type[BaseModel]]:
    return [kind for kind in (annotation, *get_args(annotation)) if isclass(kind) and issubclass(kind, BaseModel)]


def _table_at(model: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    """The table of a fault's path, in which the name of a method stands for its choice among the methods."""
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
    """The dotted names of all settings; of the methods, those of the one that is chosen, if the fault is in it."""
    for name, field in model.model_fields.items():
        yield name
        tables = _tables(field.annotation)
        if len(tables) == 1:
            yield from (f"{name}.{setting}" for setting in _settings(tables[0], ()))
        elif len(place) > 1 and place[0] == name and (chosen := _table_at(model, place[:2])):
            yield from (f"{name}.{setting}" for setting in _settings(chosen, ()))
