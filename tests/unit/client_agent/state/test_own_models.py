"""The site's own models on disk."""

from pathlib import Path

import pytest
import torch
from support.states import new_state
from support.tensors import assert_same_tensors

from client_agent.errors import StateError
from client_agent.settings import ServedPrior
from client_agent.state.folder import StateFolder
from shared.tensors.wire import encode

WEIGHTS = {"w": torch.arange(3.0)}


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    return new_state(tmp_path / "agent")


def test_alone_keeps_its_weights_and_steps(state: StateFolder) -> None:
    assert state.own.alone() is None
    state.own.save_alone(WEIGHTS, 7)
    state.own.save_alone(WEIGHTS, 12)
    found = StateFolder(state.path).own.alone()
    assert found is not None
    assert found.count("steps") == 12
    assert_same_tensors(found.tensors, WEIGHTS)


def test_an_older_agents_baseline_is_continued(state: StateFolder) -> None:
    (state.path / "baseline.safetensors").write_bytes(encode(WEIGHTS))
    found = state.own.alone()
    assert found is not None
    assert found.count("steps") == 0
    assert_same_tensors(found.tensors, WEIGHTS)


def test_an_adapted_model_belongs_to_one_model_and_one_kind(state: StateFolder) -> None:
    state.own.save_adapted(WEIGHTS, "fingerprint", "whole", 4)
    found = state.own.adapted("fingerprint", "whole")
    assert found is not None
    assert found.count("epochs") == 4
    assert state.own.adapted("another", "whole") is None
    assert state.own.adapted("fingerprint", "head") is None


@pytest.mark.parametrize("content", [b"", b"cut off", encode(WEIGHTS)[:20], b"\x02\0\0\0\0\0\0\0[]"])
def test_a_damaged_file_counts_as_missing(state: StateFolder, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (state.path / "alone.safetensors").write_bytes(content)
    assert state.own.alone() is None
    assert "it will be trained again" in caplog.text


def test_damaged_weights_are_noticed_when_they_are_used(state: StateFolder) -> None:
    (state.path / "alone.safetensors").write_bytes(encode(WEIGHTS, {"steps": "1"})[:-1])
    found = state.own.alone()
    assert found is not None
    with pytest.raises(StateError, match=r"alone\.safetensors is damaged"):
        _ = found.tensors


def test_the_prior_of_the_last_run_is_remembered(state: StateFolder) -> None:
    assert state.load_prior() == ServedPrior()
    prior = ServedPrior(kind="deployment", frequencies={"cat": 0.9}, only_own_classes=True)
    state.save_prior(prior)
    assert state.load_prior() == prior
    (state.path / "prior.json").write_text('{"kind": "odd"}')
    with pytest.raises(StateError, match=r"prior\.json cannot be read"):
        state.load_prior()
