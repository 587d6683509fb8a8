"""What survives a restart, and a crash at any point."""

import os
import stat
from pathlib import Path

import pytest
import torch
from support.states import new_state

from client_agent.errors import AgentEnded, Ending, StateError
from client_agent.state.folder import PendingUpload, StateFolder
from client_agent.status import AgentStatus, StatusSnapshot, TroubleKind
from shared.system import files

PENDING = PendingUpload(round_id=7, round_number=2, digest="d" * 64)


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    return new_state(tmp_path / "agent")


def test_only_the_owner_can_read_the_credentials(state: StateFolder) -> None:
    assert stat.S_IMODE((state.path / "identity.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(state.path.stat().st_mode) == 0o700
    assert "secret" not in repr(state.identity())
    assert state.identity().token == "secret"


def test_a_folder_without_an_agent_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="join first"):
        StateFolder(tmp_path).identity()


def test_two_agents_cannot_share_a_folder(state: StateFolder) -> None:
    with state.locked(), pytest.raises(StateError, match="Another agent"), StateFolder(state.path).locked():
        pass
    with state.locked():
        pass


def test_private_tensors_take_effect_once_the_upload_is_acknowledged(state: StateFolder) -> None:
    state.stage_upload(PENDING, b"body", {"offset": torch.ones(2)})
    assert state.private() == {}
    assert state.pending() == (PENDING, b"body")
    state.commit_upload()
    assert torch.equal(state.private()["offset"], torch.ones(2))
    assert state.pending() is None
    state.commit_upload()
    assert torch.equal(state.private()["offset"], torch.ones(2))


def test_a_dropped_upload_leaves_the_private_tensors_unchanged(state: StateFolder) -> None:
    state.stage_upload(PENDING, b"one", {"offset": torch.ones(2)})
    state.commit_upload()
    state.stage_upload(PENDING, b"two", {"offset": torch.zeros(2)})
    state.drop_upload()
    assert torch.equal(state.private()["offset"], torch.ones(2))


class Crash(BaseException):
    pass


def test_a_crash_between_any_two_steps_leaves_old_or_new_tensors_never_a_mixture(
    state: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Crash at each call that changes the disk, one after the other."""
    state.stage_upload(PENDING, b"old", {"offset": torch.zeros(2)})
    state.commit_upload()
    real_replace, real_open = Path.replace, os.open
    for allowed in range(20):
        calls = 0

        def count(allowed: int = allowed) -> None:
            nonlocal calls
            calls += 1
            if calls > allowed:
                raise Crash

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", lambda self, to, count=count: (count(), real_replace(self, to))[1])
            patch.setattr(
                files.os, "open", lambda *args, count=count: (count() if len(args) > 2 else None, real_open(*args))[1]
            )
            try:
                state.stage_upload(PENDING, b"new", {"offset": torch.ones(2)})
                state.commit_upload()
                done = True
            except Crash:
                done = False
        offset = state.private()["offset"]
        assert torch.equal(offset, torch.ones(2)) or torch.equal(offset, torch.zeros(2))
        pending = state.pending()
        assert pending is None or pending[1] == b"new"
        if done:
            assert torch.equal(offset, torch.ones(2))
            return
        state.stage_upload(PENDING, b"old", {"offset": torch.zeros(2)})
        state.commit_upload()
    pytest.fail("never came to an end")


def test_damaged_tensors_are_named_with_what_to_do(state: StateFolder) -> None:
    (state.path / "private.safetensors").write_bytes(b"cut off")
    with pytest.raises(StateError, match=r"private\.safetensors is damaged") as caught:
        state.private()
    assert "backup" in str(caught.value.next_step)


def test_troubles_and_the_ending_are_kept_for_status(state: StateFolder) -> None:
    assert state.load_status() == StatusSnapshot()
    status = AgentStatus(state.save_status)
    status.record(TroubleKind.DATA, "no images")
    status.end(AgentEnded(Ending.REVOKED, "The operator has revoked it."))
    kept = state.load_status()
    assert (kept.ended, kept.outcome) == (Ending.REVOKED, "The operator has revoked it.")
    assert [trouble.message for trouble in kept.troubles] == ["no images"]
    status.clear(TroubleKind.DATA)
    assert state.load_status().troubles == []


def test_an_upload_that_an_older_agent_staged_still_has_its_url(state: StateFolder) -> None:
    state.stage_upload(PENDING.model_copy(update={"url": "/elsewhere"}), b"body", {})
    found = state.pending()
    assert found is not None
    assert found[0].target == "/elsewhere"
    assert PENDING.target == "/v1/rounds/7/update"
