"""The class map: which class of the plan each of a site's classes stands for."""

import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from client_agent.errors import DataError
from shared.contract.suggestions import did_you_mean

_MAX_HINTS = 10  # only these are displayed; each is compared with up to 100,000 classes of the plan
_FORM = 'Write one line per class: "name in the data" = "class in the plan".'
MAP_ADVICE = '--class-map FILE, with one line per class: "name in the data" = "class in the plan".'


def read_class_map(file: Path) -> dict[str, str]:
    """Read a TOML file with one line `"name in the data" = "class in the plan"` per class."""
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"--class-map {file} cannot be read: {error.strerror}.") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"--class-map {file} is not valid TOML: {error}.", next_step=_FORM) from error
    for name, target in found.items():
        if not isinstance(target, str):
            raise DataError(
                f"--class-map {file} has no class for {name!r}.",
                next_step=f"{_FORM} Names with dots, spaces or accents need quotes.",
            )
    return found


def check_class_map(class_map: Mapping[str, str], classes: Collection[str]) -> None:
    """Raise DataError if the map names a class that is not in the plan."""
    for name, target in class_map.items():
        if target not in classes:
            found = suggest_classes([target], classes)[target]
            raise DataError(f"The class map maps {name!r} to {target!r}, which is not in the plan{found or '.'}")


def unused_names(class_map: Mapping[str, str], held: Collection[str]) -> list[str]:
    """Return a message for each name in the map that is not in the data: probably a typo."""
    unused = [name for name in class_map if name not in held]
    near = suggest_classes(unused, held)
    return [f"the class map names {name!r}, which is not in the data{near[name]}" for name in unused]


def suggest_classes(unknown: Sequence[str], classes: Iterable[str], held: Collection[str] = ()) -> dict[str, str]:
    """Return `; did you mean …?` for each unknown class; empty if the plan has no similar class.

    A class that the data already contains is not suggested: the unknown folder must mean another one.
    """
    missing = [name for name in classes if name not in held]
    found = {name: did_you_mean(name, missing) for name in unknown[:_MAX_HINTS]}
    return dict.fromkeys(unknown, "") | found
