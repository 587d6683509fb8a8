"""What survives a restart, and a crash at any point."""

import os
import stat
from pathlib import Path

import pytest
import torch

from client_agent import files
from client_agent.errors import StateError
from client_agent.history import HistoryLine
from client_agent.kept_models import Bundle
from client_agent.settings import Connection, Identity
from client_agent.state import PendingUpload, StateFolder
from shared.evaluation import Evaluation
from shared.plan import validate_plan
from shared.problems import DistransError

PENDING = PendingUpload(round_id=7, round_number=2, digest="d" * 64)


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    folder = StateFolder(tmp_path / "agent")
    plan = validate_plan({"name": "pets", "classes": ["cat", "dog"]})
    folder.create(
        Identity(
            client_id="1", name="north", token="secret", federation="pets", plan=plan,
            connection=Connection(server="http://127.0.0.1"), data="sklearn:digits",
        )
    )  # fmt: skip
    return folder


def bundle(number: int, value: float = 0.0) -> Bundle:
    one = {"w": torch.full((3,), value)}
    return Bundle(number, f"digest-{number}", one, {"offset": torch.ones(2)}, {}, {"offset_aggregation": "mean"})


def test_credentials_are_for_their_owner_alone(state: StateFolder) -> None:
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


def test_private_tensors_count_only_once_the_upload_is_acknowledged(state: StateFolder) -> None:
    state.stage_upload(PENDING, b"body", {"offset": torch.ones(2)})
    assert state.private() == {}
    assert state.pending() == (PENDING, b"body")
    state.commit_upload()
    assert torch.equal(state.private()["offset"], torch.ones(2))
    assert state.pending() is None
    state.commit_upload()
    assert torch.equal(state.private()["offset"], torch.ones(2))


def test_an_upload_that_never_counts_leaves_the_private_tensors_alone(state: StateFolder) -> None:
    state.stage_upload(PENDING, b"one", {"offset": torch.ones(2)})
    state.commit_upload()
    state.stage_upload(PENDING, b"two", {"offset": torch.zeros(2)})
    state.drop_upload()
    assert torch.equal(state.private()["offset"], torch.ones(2))


class Crash(BaseException):
    pass


def test_a_crash_between_any_two_steps_leaves_old_or_new_never_a_mixture(
    state: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that changes the disk is made the last one in turn."""
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


def test_the_last_models_are_kept_and_the_pinned_one(state: StateFolder) -> None:
    for number in range(3):
        state.save_bundle(bundle(number, float(number)), keep=2)
    assert state.bundle_numbers() == [1, 2]
    state.pin(1)
    for number in range(3, 7):
        state.save_bundle(bundle(number), keep=2)
    assert state.bundle_numbers() == [1, 5, 6]
    loaded = state.load_bundle(1)
    assert (loaded.digest, loaded.facts, loaded.shared["w"][0]) == ("digest-1", {"offset_aggregation": "mean"}, 1.0)
    state.pin(None)
    assert state.pinned() is None
    with pytest.raises(StateError, match="Kept: 1, 5, 6"):
        state.pin(4)


def test_damaged_tensors_are_named_with_what_to_do(state: StateFolder) -> None:
    (state.path / "private.safetensors").write_bytes(b"cut off")
    with pytest.raises(StateError, match=r"private\.safetensors is damaged") as caught:
        state.private()
    assert "backup" in str(caught.value.next_step)


def test_history_passes_over_a_line_that_was_cut_off(state: StateFolder) -> None:
    score = Evaluation(samples=4, correct=3, loss_sum=1.0)
    state.add_history(HistoryLine(model=1, with_offset=score, without_offset=None))
    with (state.path / "history.jsonl").open("a") as handle:
        handle.write('{"model": 2, "with_off')
    assert [line.model for line in state.history()] == [1]


@pytest.mark.parametrize("server", ["http://coordinator.example", "http://10.0.0.7:8400"])
def test_plain_http_to_another_machine_is_refused_unless_allowed(server: str) -> None:
    with pytest.raises(DistransError, match="not encrypted"):
        Connection(server=server).check()
    Connection(server=server, allow_insecure_http=True).check()


@pytest.mark.parametrize("server", ["http://127.0.0.1:1", "http://localhost", "http://[::1]:8400", "https://x.example"])
def test_loopback_and_https_are_fine(server: str) -> None:
    Connection(server=server).check()


def test_an_address_that_is_none() -> None:
    with pytest.raises(DistransError, match="no web address"):
        Connection(server="coordinator").check()
