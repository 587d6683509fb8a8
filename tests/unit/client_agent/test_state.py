"""What survives a restart, and a crash at any point."""

import errno
import json
import os
import stat
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from client_agent import history
from client_agent.condition import Condition, Report, TroubleKind
from client_agent.errors import AgentEnded, Ending, StateError
from client_agent.history import HistoryLine
from client_agent.kept_models import Bundle
from client_agent.settings import Identity
from client_agent.state import PendingUpload, StateFolder
from shared import files
from shared.evaluation import Evaluation
from shared.http.connection import Connection
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


def approve(state: StateFolder, number: int, *, approved: bool = True) -> None:
    state.add_history(
        HistoryLine(
            model=number,
            digest=f"digest-{number}",
            fingerprint=bundle(number).fingerprint,
            with_offset=None,
            without_offset=None,
            served=approved,
        )
    )


def test_a_line_that_was_cut_off_does_not_swallow_the_next_one(state: StateFolder) -> None:
    with (state.path / "history.jsonl").open("wb") as handle:
        handle.write('{"model": 2, "reason": "é'.encode()[:-1])
    approve(state, 3)
    approve(state, 4)
    assert [line.model for line in state.history()] == [3, 4]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
def test_the_history_is_for_its_owner_alone_whatever_the_umask(state: StateFolder, umask: int) -> None:
    file = state.path / "history.jsonl"
    before = os.umask(umask)
    try:
        approve(state, 1)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        file.chmod(0o644)  # as older agents left it
        approve(state, 2)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_a_line_that_does_not_fit_on_the_disk_leaves_the_others_whole(
    state: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    approve(state, 1)
    real_write, calls = os.write, []

    def full(descriptor: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(descriptor, data[:10])

    with monkeypatch.context() as patch:
        patch.setattr("client_agent.history.os.write", full)
        with pytest.raises(OSError, match="No space"):
            approve(state, 2)
    approve(state, 3)
    assert [line.model for line in state.history()] == [1, 3]
    assert (state.path / "history.jsonl").read_text().count("\n") == 2


def test_the_history_of_a_flood_of_models_is_bounded_and_keeps_what_is_approved(
    state: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MAX_BYTES", 20_000)
    monkeypatch.setattr(history, "_KEPT_LINES", 10)
    state.save_bundle(bundle(1), keep=2)
    approve(state, 1)
    for number in range(1000):
        state.add_history(
            HistoryLine(model=1, digest=f"{number:064x}", with_offset=None, without_offset=None, served=False)
        )
    assert (state.path / "history.jsonl").stat().st_size < 21_000
    assert [kept.number for kept in state.choices()] == [1]
    assert [line.digest for line in state.history()][-10:] == [f"{number:064x}" for number in range(990, 1000)]


def test_many_models_of_one_number_are_read_in_linear_time(state: StateFolder) -> None:
    """Comparing each line with all others would take minutes, at every start, before anything is served."""
    line = HistoryLine(model=1, digest="%", with_offset=None, without_offset=None, served=False).model_dump_json()
    text = "\n".join(line.replace("%", f"{number:064x}") for number in range(50_000))
    (state.path / "history.jsonl").write_text(text)
    assert len(state.history()) == 50_000


LINES = st.builds(
    HistoryLine,
    model=st.integers(0, 1),
    digest=st.sampled_from(["", "a", "b"]),
    fingerprint=st.sampled_from(["", "x", "y"]),
    with_offset=st.none(),
    without_offset=st.none(),
)


@given(st.lists(LINES, max_size=12))
def test_the_last_line_about_each_bundle_counts(lines: list[HistoryLine]) -> None:
    expected: list[HistoryLine] = []
    for line in lines:
        expected = [
            old
            for old in expected
            if old.model != line.model
            or (line.digest and (old.digest != line.digest or old.fingerprint not in ("", line.fingerprint)))
        ]
        expected.append(line)
    with tempfile.NamedTemporaryFile() as file:
        file.write("\n".join(line.model_dump_json() for line in lines).encode())
        file.flush()
        assert history.read_lines(Path(file.name)) == expected


def test_the_served_model_is_never_pruned(state: StateFolder) -> None:
    state.save_bundle(bundle(1), keep=2)
    approve(state, 1)
    for number in range(2, 9):
        state.save_bundle(bundle(number), keep=2)
        approve(state, number, approved=False)
    assert state.bundle_numbers() == [1, 7, 8]
    assert [kept.number for kept in state.choices()] == [1]


def test_the_served_model_is_kept_although_it_is_not_the_first_choice(state: StateFolder) -> None:
    for number in (1, 2):
        state.save_bundle(bundle(number), keep=2)
        approve(state, number)
    served = bundle(1)  # since the files of model 2 are damaged
    for number in range(3, 9):
        state.save_bundle(bundle(number), keep=2, served=(1, served.digest, served.fingerprint))
        approve(state, number, approved=False)
    assert state.bundle_numbers() == [1, 2, 7, 8]


@pytest.mark.parametrize("text", ["null", "[]", "7", '"text"', "{"])
def test_a_damaged_description_of_one_model_does_not_hide_the_others(state: StateFolder, text: str) -> None:
    for number in (1, 2):
        state.save_bundle(bundle(number), keep=2)
        approve(state, number)
    kept = state.kept_models()
    (kept[1].folder / "about.json").write_text(text)
    assert [one.number for one in state.choices()] == [1]
    with pytest.raises(StateError, match="cannot be read"):
        state.load(kept[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_root_writes_belongs_to_the_owner_of_the_folder(state: StateFolder) -> None:
    """As with `sudo distrans-agent pin`, next to an agent that runs as a user of its own."""
    state.save_bundle(bundle(1), keep=2)
    os.chown(state.path, 65534, 65534)
    state.pin(1)
    about = (state.path / "pin").stat()
    assert (about.st_uid, about.st_gid, stat.S_IMODE(about.st_mode)) == (65534, 65534, 0o600)


@pytest.mark.parametrize("text", ["9" * 5000, "", "-1", "one", "1.5"])
def test_a_pin_that_is_not_a_number_is_no_pin(state: StateFolder, text: str) -> None:
    (state.path / "pin").write_text(text)
    assert state.pinned() is None


def test_models_after_a_restored_backup_are_newer_although_their_numbers_are_smaller(state: StateFolder) -> None:
    for number in (4, 5, 6):
        state.save_bundle(bundle(number), keep=2)
        approve(state, number)
    state.save_bundle(replace(bundle(3), digest="another"), keep=2)
    assert state.bundle_numbers() == [6, 3]
    assert [kept.number for kept in state.choices()] == [6]


def test_a_pin_holds_the_very_model_it_was_set_to(state: StateFolder) -> None:
    state.save_bundle(bundle(1), keep=1)
    state.pin(1)
    state.save_bundle(replace(bundle(1), digest="another"), keep=1)
    assert [kept.digest for kept in state.kept_models()] == ["digest-1", "another"]
    assert [kept.digest for kept in state.choices()] == ["digest-1"]
    assert state.pinned() == 1


def test_what_an_older_agent_has_left_is_served(state: StateFolder) -> None:
    """Folders without an order, lines and pins without a digest."""
    state.save_bundle(bundle(5), keep=2)
    folder = (state.path / "models" / "5-0").rename(state.path / "models" / "5")
    about = json.loads((folder / "about.json").read_text())
    (folder / "about.json").write_text(json.dumps({key: about[key] for key in ("number", "digest", "facts")}))
    assert state.choices() == []
    state.add_history(HistoryLine(model=5, with_offset=None, without_offset=None))
    assert [kept.number for kept in state.choices()] == [5]
    state.save_bundle(replace(bundle(5), digest="another"), keep=2)
    assert [kept.digest for kept in state.choices()] == ["digest-5"]
    (state.path / "pin").write_text("5")
    assert [kept.digest for kept in state.choices()] == ["digest-5"]
    another = state.kept_models()[-1]  # of a coordinator that was restored from a backup
    line = HistoryLine(model=5, digest="another", with_offset=None, without_offset=None)
    state.add_history(line.model_copy(update={"fingerprint": another.fingerprint}))
    assert [kept.digest for kept in state.choices()] == ["digest-5", "another"]


def test_what_troubles_the_agent_is_kept_for_status(state: StateFolder) -> None:
    assert state.condition() == Report()
    condition = Condition(state.save_condition)
    condition.record(TroubleKind.DATA, "no images")
    condition.end(AgentEnded(Ending.REVOKED, "The operator has revoked it."))
    kept = state.condition()
    assert (kept.ended, kept.outcome) == (Ending.REVOKED, "The operator has revoked it.")
    assert [trouble.message for trouble in kept.troubles] == ["no images"]
    condition.clear(TroubleKind.DATA)
    assert state.condition().troubles == []


@pytest.mark.parametrize("server", ["http://coordinator.example", "http://10.0.0.7:8400"])
def test_plain_http_to_another_machine_is_refused_unless_allowed(server: str) -> None:
    with pytest.raises(DistransError, match="not encrypted"):
        Connection(server=server).check()
    Connection(server=server, allow_insecure_http=True).check()


@pytest.mark.parametrize("server", ["http://127.0.0.1:1", "http://localhost", "http://[::1]:8400", "https://x.example"])
def test_loopback_and_https_are_fine(server: str) -> None:
    Connection(server=server).check()


def test_an_address_that_is_none() -> None:
    with pytest.raises(DistransError, match="is not a valid URL"):
        Connection(server="coordinator").check()
