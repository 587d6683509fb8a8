"""Which models are kept, which may be served, and the pin."""

import json
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from support.states import approve, bundle, new_state

from client_agent.errors import StateError
from client_agent.state.decisions import GateDecision
from client_agent.state.folder import StateFolder


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    return new_state(tmp_path / "agent")


def test_the_last_models_and_the_pinned_one_are_kept(state: StateFolder) -> None:
    for number in range(3):
        state.models.save(bundle(number, float(number)), keep=2)
    assert state.models.numbers() == [1, 2]
    state.models.pin(1)
    for number in range(3, 7):
        state.models.save(bundle(number), keep=2)
    assert state.models.numbers() == [1, 5, 6]
    loaded = state.models.load_number(1)
    assert (loaded.digest, loaded.facts, loaded.shared["w"][0]) == ("digest-1", {"offset_aggregation": "mean"}, 1.0)
    state.models.pin(None)
    assert state.models.pinned() is None
    with pytest.raises(StateError, match="Kept: 1, 5, 6"):
        state.models.pin(4)


def test_the_served_model_is_never_pruned(state: StateFolder) -> None:
    state.models.save(bundle(1), keep=2)
    approve(state, 1)
    for number in range(2, 9):
        state.models.save(bundle(number), keep=2)
        approve(state, number, approved=False)
    assert state.models.numbers() == [1, 7, 8]
    assert [kept.key.number for kept in state.models.servable()] == [1]


def test_the_served_model_is_kept_even_if_it_is_not_the_first_choice(state: StateFolder) -> None:
    for number in (1, 2):
        state.models.save(bundle(number), keep=2)
        approve(state, number)
    served = bundle(1)  # since the files of model 2 are damaged
    for number in range(3, 9):
        state.models.save(bundle(number), keep=2, served=served.key)
        approve(state, number, approved=False)
    assert state.models.numbers() == [1, 2, 7, 8]


@pytest.mark.parametrize("text", ["null", "[]", "7", '"text"', "{"])
def test_a_model_with_a_damaged_description_does_not_hide_the_others(state: StateFolder, text: str) -> None:
    for number in (1, 2):
        state.models.save(bundle(number), keep=2)
        approve(state, number)
    kept = state.models.all()
    (kept[1].folder / "about.json").write_text(text)
    assert [one.key.number for one in state.models.servable()] == [1]
    with pytest.raises(StateError, match="cannot be read"):
        state.models.load(kept[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_written_by_root_belong_to_the_owner_of_the_folder(state: StateFolder) -> None:
    """As with `sudo distrans-agent pin` for an agent that runs as another user."""
    state.models.save(bundle(1), keep=2)
    os.chown(state.path, 65534, 65534)
    state.models.pin(1)
    about = (state.path / "pin").stat()
    assert (about.st_uid, about.st_gid, stat.S_IMODE(about.st_mode)) == (65534, 65534, 0o600)


@pytest.mark.parametrize("text", ["9" * 5000, "", "-1", "one", "1.5"])
def test_a_pin_that_is_not_a_number_is_ignored(state: StateFolder, text: str) -> None:
    (state.path / "pin").write_text(text)
    assert state.models.pinned() is None


def test_models_from_a_restored_coordinator_are_newer_despite_smaller_numbers(state: StateFolder) -> None:
    for number in (4, 5, 6):
        state.models.save(bundle(number), keep=2)
        approve(state, number)
    state.models.save(replace(bundle(3), digest="another"), keep=2)
    assert state.models.numbers() == [6, 3]
    assert [kept.key.number for kept in state.models.servable()] == [6]


def test_a_pin_names_one_model_even_if_its_number_is_reused(state: StateFolder) -> None:
    state.models.save(bundle(1), keep=1)
    state.models.pin(1)
    state.models.save(replace(bundle(1), digest="another"), keep=1)
    assert [kept.key.digest for kept in state.models.all()] == ["digest-1", "another"]
    assert [kept.key.digest for kept in state.models.servable()] == ["digest-1"]
    assert state.models.pinned() == 1


def test_models_stored_by_an_older_agent_are_served(state: StateFolder) -> None:
    """Its folders have no order; its lines and pins have no digest."""
    state.models.save(bundle(5), keep=2)
    folder = (state.path / "models" / "5-0").rename(state.path / "models" / "5")
    about = json.loads((folder / "about.json").read_text())
    (folder / "about.json").write_text(json.dumps({key: about[key] for key in ("number", "digest", "facts")}))
    assert state.models.servable() == []
    state.models.add_decision(GateDecision(model=5, with_offset=None, without_offset=None))
    assert [kept.key.number for kept in state.models.servable()] == [5]
    state.models.save(replace(bundle(5), digest="another"), keep=2)
    assert [kept.key.digest for kept in state.models.servable()] == ["digest-5"]
    (state.path / "pin").write_text("5")
    assert [kept.key.digest for kept in state.models.servable()] == ["digest-5"]
    another = state.models.all()[-1]  # from a coordinator that was restored from a backup
    line = GateDecision(model=5, digest="another", with_offset=None, without_offset=None)
    state.models.add_decision(line.model_copy(update={"fingerprint": another.key.fingerprint}))
    assert [kept.key.digest for kept in state.models.servable()] == ["digest-5", "another"]


def test_a_pinned_model_that_cannot_be_served_is_explained(state: StateFolder) -> None:
    assert state.models.pin_problem() == ""
    state.models.save(bundle(1), keep=2)
    state.models.pin(1)
    assert (state.models.pin_problem(), state.models.lacks_pinned()) == ("", False)
    (kept,) = state.models.all()
    (kept.folder / "model.safetensors").write_bytes(b"damaged")
    assert "model.safetensors has changed since it was written." in state.models.pin_problem()
    shutil.rmtree(kept.folder)
    assert (state.models.pin_problem(), state.models.lacks_pinned()) == ("It is no longer kept.", True)
