"""A deployment's class frequencies, from a file: how often each class occurs where predictions are used."""

import csv
import io
import json
import math
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from client_agent.data.class_map import suggest_classes
from client_agent.errors import DataError

_MAX_BYTES = 16 * 1024 * 1024
_MAX_FREQUENCY = 1e12
_FORMS = (
    'Use .json with {"class": frequency, …}, .toml with "class" = frequency, '
    "or .csv with the columns class and frequency."
)


def read_prior_file(file: Path, classes: Collection[str]) -> dict[str, float]:
    """Return the relative frequency of each class in a file; raise DataError if the file or a class is not usable.

    Classes that the file does not name have frequency 0, which smoothing turns into a small one.
    """
    try:
        with file.open("rb") as handle:
            body = handle.read(_MAX_BYTES + 1)
    except OSError as error:
        raise DataError(
            f"--prior {file} cannot be read: {error.strerror}.", next_step="Use site, none, or the path of a file."
        ) from error
    if len(body) > _MAX_BYTES:
        raise DataError(f"--prior {file} has more than {_MAX_BYTES} bytes.", next_step=_FORMS)
    try:
        found = _parse(file.suffix.lower(), body.decode("utf-8-sig"))
    except (ValueError, RecursionError, csv.Error) as error:  # also UnicodeDecodeError and tomllib's and json's
        raise DataError(f"--prior {file} cannot be read: {str(error).rstrip('.')}.", next_step=_FORMS) from error
    frequencies = {name: _frequency(file, name, value) for name, value in found.items()}
    for name in frequencies:
        if name not in classes:
            hint = suggest_classes([name], classes)[name]
            raise DataError(f"--prior {file} names {name!r}, which is not in the plan{hint or '.'}")
    if not any(frequencies.values()):
        raise DataError(f"--prior {file} has no class with a frequency above 0.", next_step=_FORMS)
    return frequencies


def _parse(suffix: str, text: str) -> Mapping[str, Any]:
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix == ".csv":
        rows = list(csv.DictReader(io.StringIO(text), strict=True))
        if not rows or not {"class", "frequency"} <= rows[0].keys():
            raise ValueError("it has no columns class and frequency")
        return _without_repeats([(row["class"], row["frequency"]) for row in rows])
    if suffix == ".json":
        found = json.loads(text, object_pairs_hook=_without_repeats)
        if not isinstance(found, dict):
            raise ValueError("it does not hold an object")
        return found
    raise ValueError(f"files ending in {suffix!r} are not supported")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it names a class twice")
    return found


def _frequency(file: Path, name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number <= _MAX_FREQUENCY:  # also false for NaN
        raise DataError(
            f"--prior {file} gives {str(name)[:100]!r} the frequency {str(value)[:100]!r}.",
            next_step=f"Use a number from 0 to {_MAX_FREQUENCY:.0e}, such as a share or a count.",
        )
    return number
