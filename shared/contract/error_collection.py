"""Collects every error in a plan at once, with readable messages.

pydantic checks whether fields fit together only once each field is valid on its own. So an invalid plan is validated
again without its invalid fields until no new errors appear, and rules that involve an invalid field are skipped.
A body of a few megabytes can contain a hundred thousand errors: only the first `MAX_LISTED` are listed.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from shared.contract.error_messages import MESSAGE, describe_error

MAX_LISTED = 100
_MAX_LINE = 300  # characters; a key may be as long as the entire input
_UNLISTED = "unlisted_errors"  # type of the entry that counts the errors beyond MAX_LISTED
# Stand in for required fields while the rest is checked.
_PLACEHOLDERS: dict[str, Any] = {"name": "unnamed", "classes": ["a", "b"]}


class ConflictingFields(ValueError):
    """Fields that are valid on their own but contradict each other."""

    def __init__(self, message: str, *fields: str) -> None:
        super().__init__(message)
        self.fields = fields  # dotted, relative to the table; the first is dropped to look for further errors


def collect_errors(
    data: Mapping[str, Any], first: ValidationError, validate: Callable[[Any], object], model: type[BaseModel]
) -> ValidationError:
    """Return the errors in `first`, which `validate(data)` raised, and all further ones as a single error.

    If `first` has more than `MAX_LISTED` errors, return those alone: comparing errors takes quadratic time.
    """
    if first.error_count() > MAX_LISTED:
        return _truncated(first, model)
    remaining, failure = copy.deepcopy(dict(data)), first
    found: list[ErrorDetails] = []
    invalid: set[tuple[str, ...]] = set()
    while True:
        dropped = False
        for error in failure.errors():
            fields = _fields_of(error)
            if not any(_overlap(field, other) for field in fields for other in invalid):
                found.append(error)
            invalid.update(fields[:1])
            dropped |= _drop(remaining, fields[0])
        if not dropped:
            break
        try:
            validate(remaining)
            break
        except ValidationError as further:
            failure = further
    return ValidationError.from_exception_data(first.title, [_with_message(error, model) for error in found])


def _with_message(error: ErrorDetails, model: type[BaseModel]) -> InitErrorDetails:
    custom = PydanticCustomError(error["type"], "{message}", {MESSAGE: describe_error(error, model)})
    return InitErrorDetails(type=custom, loc=error["loc"], input=error["input"])


def _truncated(failure: ValidationError, model: type[BaseModel]) -> ValidationError:
    listed = [_with_message(error, model) for error in failure.errors(include_url=False)[:MAX_LISTED]]
    rest = PydanticCustomError(_UNLISTED, "{count} more errors", {"count": failure.error_count() - MAX_LISTED})
    return ValidationError.from_exception_data(
        failure.title, [*listed, InitErrorDetails(type=rest, loc=(), input=None)]
    )


def count_errors(errors: Sequence[Mapping[str, Any]]) -> int:
    """Count the errors, including those that `collect_errors` did not list."""
    return sum(error["ctx"]["count"] if error["type"] == _UNLISTED else 1 for error in errors)


def list_errors(errors: Sequence[Mapping[str, Any]], describe: Callable[[Any], str]) -> list[str]:
    """Describe the first `MAX_LISTED` errors, one short line each; a last line counts the rest."""
    listed = [error for error in errors[:MAX_LISTED] if error["type"] != _UNLISTED]
    rest = count_errors(errors) - len(listed)
    return [_shortened(describe(error)) for error in listed] + ([f"and {rest:,} more"] if rest else [])


def error_lines(failure: ValidationError, model: type[BaseModel] | None = None) -> list[str]:
    """Return one indented line per error in a plan or an experiment: the field's dotted name and what is wrong."""

    def describe(error: ErrorDetails) -> str:
        return f"{'.'.join(field_path(error)) or 'plan'}: {describe_error(error, model)}"

    return [f"  {line}" for line in list_errors(failure.errors(include_url=False), describe)]


def _shortened(line: str) -> str:
    return line if len(line) <= _MAX_LINE else line[: _MAX_LINE - 1] + "…"


def field_path(error: ErrorDetails) -> list[str]:
    """Return the path of the field an error is about, as in the plan's file."""
    path = [str(part) for part in error["loc"]]
    if path[:1] == ["method"] and len(path) > 1:
        path.pop(1)  # the tag of a discriminated union is not a key in the file
    return path


def _fields_of(error: ErrorDetails) -> list[tuple[str, ...]]:
    """Return the fields an error involves; the first is the one to drop."""
    path = tuple(field_path(error))
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, ConflictingFields):
        return [(*path, *field.split(".")) for field in cause.fields]
    return [path]


def _overlap(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def _drop(data: dict[str, Any], path: tuple[str, ...]) -> bool:
    """Remove the field, or the list that contains it, from the data; return whether anything changed."""
    table: Any = data
    for depth, key in enumerate(path):
        last = depth == len(path) - 1
        if not isinstance(table, dict):
            return False
        if depth == 0 and key in _PLACEHOLDERS:
            before, table[key] = table.get(key), _PLACEHOLDERS[key]
            return bool(before != _PLACEHOLDERS[key])
        if last or not isinstance(table.get(key), dict):
            return table.pop(key, None) is not None
        table = table[key]
    return False
