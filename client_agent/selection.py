"""Which of a site's images are used, and under which of the plan's class names."""

import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from client_agent.errors import DataError
from shared.near_match import did_you_mean

_MOST_HINTS = 10  # as many as are shown; a plan may have 100,000 classes to compare with
_FORM = 'Write a line "name here" = "class of the plan" for each class.'
MAP_ADVICE = '--class-map FILE, with a line "name here" = "class of the plan" for each.'


class Skipped(BaseModel):
    """What `join --skip-bad` left out; `run` leaves out the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    files: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()


NOTHING = Skipped()


def read_class_map(file: Path) -> dict[str, str]:
    """Read a class map: TOML, one line `"name in the data" = "class of the plan"` per class."""
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"--class-map {file} cannot be read: {error.strerror}.") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"--class-map {file} is not valid TOML: {error}.", next_step=_FORM) from error
    for name, target in found.items():
        if not isinstance(target, str):
            raise DataError(
                f"--class-map {file} gives no class for {name!r}.",
                next_step=f"{_FORM} Names with dots, spaces or accents need the quotes.",
            )
    return found


def check_class_map(class_map: Mapping[str, str], classes: Collection[str]) -> None:
    """Raise DataError when the map leads to a class that the plan does not have."""
    for name, target in class_map.items():
        if target not in classes:
            found = hints([target], classes)[target]
            raise DataError(f"The class map turns {name!r} into {target!r}, which is not in the plan{found or '.'}")


def unused_names(class_map: Mapping[str, str], held: Collection[str]) -> list[str]:
    """Return a line for each name in the map that the data do not have: probably a typing error."""
    unused = [name for name in class_map if name not in held]
    near = hints(unused, held)
    return [f"the class map names {name!r}, which the data do not have{near[name]}" for name in unused]


def hints(unknown: Sequence[str], classes: Iterable[str], held: Collection[str] = ()) -> dict[str, str]:
    """Return `; did you mean …?` for each unknown class, or nothing where the plan has no similar one.

    A class that the data hold under its own name is not what another folder was meant to be called.
    """
    missing = [name for name in classes if name not in held]
    found = {name: did_you_mean(name, missing) for name in unknown[:_MOST_HINTS]}
    return dict.fromkeys(unknown, "") | found
