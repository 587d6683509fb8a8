"""A place: one setting of an experiment in which its methods are compared; results differ in method and seed."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from lab.experiments.results import Result, data_of


class Place(NamedTuple):
    """A data set with its shift, the number of clients, DH and the varied value."""

    data: str
    clients: int
    dh: float
    varied: Any


def place_of(result: Result) -> Place:
    """Return where a result belongs."""
    cell = result["cell"]
    return Place(data_of(result), cell["clients"], cell["dh"], cell["varied"])


def places_of(results: Iterable[Result]) -> list[Place]:
    """Return all places in a fixed order."""
    places = {place_of(result) for result in results}
    return sorted(places, key=lambda place: (place[:3], str(type(place.varied)), place.varied))


def results_at(results: Sequence[Result], place: Place, label: str) -> list[Result]:
    """Return a method's results at a place, one per seed."""
    return [result for result in results if place_of(result) == place and result["cell"]["label"] == label]


def heading(place: Place, among: Sequence[Place], varied_key: str | None) -> str:
    """Return a column heading that distinguishes the place from the others of its table."""
    parts = [f"{place.clients} clients"] if len({other.clients for other in among}) > 1 else []
    if len({other.dh for other in among}) > 1 or not varied_key:
        parts.append(f"DH {place.dh:.0%}")
    if varied_key:
        parts.append(f"any {varied_key}" if place.varied is None else f"{varied_key} = {place.varied}")
    return ", ".join(parts)
