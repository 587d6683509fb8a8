"""Every fault of a plan at once, in this project's words.

pydantic checks how fields fit each other only when each of them is right by itself. Here a plan with faults is checked
again without the wrong fields until nothing new is found, and a rule that concerns a wrong field is left alone.
A body of a few megabytes can hold a hundred thousand faults; only the first `MAX_FAULTS` are listed, the rest counted.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from shared.fault_words import WORDS, in_words

MAX_FAULTS = 100
_MAX_LINE = 300  # characters; a key of the input may be as long as the whole input
_REST = "further_faults"  # the type of the fault that counts those that are not listed
# Stand in for the fields without a default while the rest is checked.
_PLACEHOLDERS: dict[str, Any] = {"name": "unnamed", "classes": ["a", "b"]}


class FieldsDisagree(ValueError):
    """Fields of one table, or of the whole plan, that are right by themselves and do not fit each other."""

    def __init__(self, message: str, *fields: str) -> None:
        super().__init__(message)
        self.fields = fields  # dotted, relative to the table; the first is left out to look for further faults


def every_fault(
    data: Mapping[str, Any], first: ValidationError, validate: Callable[[Any], object], model: type[BaseModel]
) -> ValidationError:
    """The faults in `first` and all further ones, as one error. `validate` is what raised `first` for `data`.

    With more than `MAX_FAULTS` in `first` no further ones are looked for: comparing faults costs their number squared.
    """
    if first.error_count() > MAX_FAULTS:
        return _first_of(first, model)
    remaining, error = copy.deepcopy(dict(data)), first
    found: list[ErrorDetails] = []
    wrong: set[tuple[str, ...]] = set()
    while True:
        dropped = False
        for fault in error.errors():
            concerned = _concerned(fault)
            if not any(_overlap(field, other) for field in concerned for other in wrong):
                found.append(fault)
            wrong.update(concerned[:1])
            dropped |= _drop(remaining, concerned[0])
        if not dropped:
            break
        try:
            validate(remaining)
            break
        except ValidationError as further:
            error = further
    return ValidationError.from_exception_data(first.title, [_worded(fault, model) for fault in found])


def _worded(fault: ErrorDetails, model: type[BaseModel]) -> InitErrorDetails:
    words = PydanticCustomError(fault["type"], "{words}", {WORDS: in_words(fault, model)})
    return InitErrorDetails(type=words, loc=fault["loc"], input=fault["input"])


def _first_of(error: ValidationError, model: type[BaseModel]) -> ValidationError:
    lines = [_worded(fault, model) for fault in error.errors(include_url=False)[:MAX_FAULTS]]
    rest = PydanticCustomError(_REST, "{count} further faults", {"count": error.error_count() - MAX_FAULTS})
    return ValidationError.from_exception_data(error.title, [*lines, InitErrorDetails(type=rest, loc=(), input=None)])


def fault_count(faults: Sequence[Mapping[str, Any]]) -> int:
    """The number of faults, including those that `every_fault` counted without listing them."""
    return sum(fault["ctx"]["count"] if fault["type"] == _REST else 1 for fault in faults)


def list_faults(faults: Sequence[Mapping[str, Any]], describe: Callable[[Any], str]) -> list[str]:
    """Describe the first `MAX_FAULTS` faults, one short line each; the last line counts the others."""
    listed = [fault for fault in faults[:MAX_FAULTS] if fault["type"] != _REST]
    rest = fault_count(faults) - len(listed)
    return [_shortened(describe(fault)) for fault in listed] + ([f"and {rest:,} more"] if rest else [])


def fault_lines(error: ValidationError, model: type[BaseModel] | None = None) -> list[str]:
    """The faults of a plan or an experiment, one per indented line: the field's dotted name, then what is wrong."""

    def describe(fault: ErrorDetails) -> str:
        return f"{'.'.join(_path(fault)) or 'plan'}: {in_words(fault, model)}"

    return [f"  {line}" for line in list_faults(error.errors(include_url=False), describe)]


def _shortened(line: str) -> str:
    return line if len(line) <= _MAX_LINE else line[: _MAX_LINE - 1] + "…"


def _path(fault: ErrorDetails) -> list[str]:
    path = [str(part) for part in fault["loc"]]
    if path[:1] == ["method"] and len(path) > 1:
        path.pop(1)  # the tag of a discriminated union is no key of the file
    return path


def _concerned(fault: ErrorDetails) -> list[tuple[str, ...]]:
    """The fields a fault is about; the first is the one to do without."""
    path = tuple(_path(fault))
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, FieldsDisagree):
        return [(*path, *field.split(".")) for field in cause.fields]
    return [path]


def _overlap(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def _drop(data: dict[str, Any], path: tuple[str, ...]) -> bool:
    """Take the field out of the data, or the list it is in; whether anything changed."""
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
