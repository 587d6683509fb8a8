"""A gate with an empty state folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.gates import make_gate, new_state

from client_agent.serving.gate import ModelGate
from client_agent.serving.queue import PredictionQueue
from client_agent.state.folder import StateFolder


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    return new_state(tmp_path)


@pytest.fixture
def predictions() -> Iterator[PredictionQueue]:
    one = PredictionQueue(1, 1, 1)
    yield one
    one.stop()


@pytest.fixture
def gate(state: StateFolder, predictions: PredictionQueue) -> ModelGate:
    return make_gate(state, predictions)
