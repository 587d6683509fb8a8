"""Candidates next to their models."""

from pathlib import Path

import pytest
from support.states import approve, bundle, new_state

from client_agent.errors import StateError
from client_agent.state.decisions import GateDecision
from client_agent.state.folder import StateFolder
from client_agent.state.kept_models import KeptModel
from client_agent.state.records import CandidateRecord, MemberRecord
from shared.system import files
from shared.tensors.wire import digest


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    folder = new_state(tmp_path / "agent")
    folder.models.save(bundle(1), keep=5)
    return folder


def record(name: str = "alone", weights: bytes = b"weights") -> CandidateRecord:
    member = MemberRecord(base="alone", uses_prior=False, weight=1.0)
    return CandidateRecord(name=name, members=(member,), temperature=0.1 + 0.2, files={"alone": digest(weights)})


def store(state: StateFolder, one: CandidateRecord, weights: bytes = b"weights") -> str:
    return state.models.save_record(bundle(1).key, one, {"alone": weights})


def decide(state: StateFolder, name: str, *, served: bool = True) -> None:
    line = GateDecision(
        model=1, digest="digest-1", fingerprint=bundle(1).fingerprint, with_offset=None, without_offset=None,
        record=name, served=served,
    )  # fmt: skip
    state.models.add_decision(line)


def kept(state: StateFolder) -> KeptModel:
    (one,) = state.models.all()
    return one


def test_a_decisions_candidate_is_loaded_exactly(state: StateFolder) -> None:
    decide(state, store(state, record()))
    again = StateFolder(state.path).models
    assert again.record(kept(state)) == record()
    assert kept(state).candidates.weights(record()) == {"alone": b"weights"}
    assert again.first_choice() == kept(state)


def test_a_model_of_an_older_agent_has_no_candidate(state: StateFolder) -> None:
    approve(state, 1)
    assert state.models.record(kept(state)) is None
    assert state.models.first_choice() == kept(state)


def test_a_candidate_of_a_model_that_is_not_kept_is_not_stored(state: StateFolder) -> None:
    assert state.models.save_record(bundle(2).key, record(), {"alone": b"weights"}) == ""


@pytest.mark.parametrize("pattern", ["candidate-*.json", "alone-*.safetensors"])
@pytest.mark.parametrize("is_gone", [True, False])
def test_a_damaged_candidate_is_noticed(state: StateFolder, pattern: str, is_gone: bool) -> None:
    decide(state, store(state, record()))
    (file,) = kept(state).folder.glob(pattern)
    if is_gone:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes().replace(b"alone", b"ALONE") + b" ")
    assert state.models.first_choice() is None
    with pytest.raises(StateError):
        kept(state).candidates.weights(kept(state).candidates.load(state.models.record_name(kept(state))))


def test_the_pin_keeps_its_candidate_when_the_gate_decides_again(state: StateFolder) -> None:
    first = store(state, record("first"))
    decide(state, first)
    state.models.pin(1)
    for name in ("second", "third", "fourth"):
        decide(state, store(state, record(name, name.encode()), name.encode()))
    assert state.models.record(kept(state)) == record("first")
    assert kept(state).candidates.damage(first) == ""
    state.models.pin(None)
    found = state.models.record(kept(state))
    assert found is not None
    assert found.name == "fourth"


def test_only_candidates_in_use_are_kept(state: StateFolder) -> None:
    for number in range(5):
        weights = str(number).encode()
        decide(state, store(state, record(f"candidate {number}", weights), weights))
    assert len(list(kept(state).folder.glob("candidate-*.json"))) == 2  # the last one and the one before
    assert len(list(kept(state).folder.glob("alone-*.safetensors"))) == 2
    assert {file.name for file in kept(state).folder.iterdir()} >= {"model.safetensors", "private.safetensors"}


def test_a_model_that_arrives_again_keeps_its_candidate(state: StateFolder) -> None:
    decide(state, store(state, record()))
    state.models.save(bundle(2), keep=5)
    state.models.save(bundle(1), keep=1)
    assert [one.key.number for one in state.models.all()] == [1]
    assert state.models.record(kept(state)) == record()


class Crash(BaseException):
    pass


def test_a_crash_between_any_two_writes_leaves_a_complete_candidate(
    state: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide(state, store(state, record("old", b"old"), b"old"))
    real = files.os.fsync
    for allowed in range(50):
        calls = 0

        def fsync(descriptor: int, allowed: int = allowed) -> None:
            nonlocal calls
            calls += 1
            if calls > allowed:
                raise Crash
            real(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(files.os, "fsync", fsync)
            try:
                decide(state, store(state, record("new", b"new"), b"new"))
                return
            except Crash:
                pass
        again = StateFolder(state.path).models
        found = again.record(kept(state))
        assert found is not None
        assert again.first_choice() is not None
        assert kept(state).candidates.weights(found) == {"alone": found.name.encode()}
    pytest.fail("never came to an end")
