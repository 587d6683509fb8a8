"""Garbage collection in the agent."""

import gc
from collections.abc import Iterator

import pytest

from client_agent.memory import exempt_from_collection


@pytest.fixture(autouse=True)
def _collect_afterward() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_is_loaded_is_no_longer_visited() -> None:
    loaded = [[number] for number in range(1000)]
    exempt_from_collection()
    new = [[]]
    visited = {id(one) for one in gc.get_objects()}
    assert id(loaded) not in visited
    assert id(new) in visited
