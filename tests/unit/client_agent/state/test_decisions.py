"""The file of the gate's decisions."""

import errno
import os
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.states import approve, bundle, new_state

from client_agent.state import decisions
from client_agent.state.decisions import GateDecision
from client_agent.state.folder import StateFolder
from shared.contract.measurements import Evaluation


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    return new_state(tmp_path / "agent")


def test_a_line_cut_off_by_a_crash_is_skipped(state: StateFolder) -> None:
    score = Evaluation(samples=4, correct=3, loss_sum=1.0)
    state.models.add_decision(GateDecision(model=1, with_offset=score, without_offset=None))
    with (state.path / "history.jsonl").open("a") as handle:
        handle.write('{"model": 2, "with_off')
    assert [line.model for line in state.models.history()] == [1]


def test_a_line_cut_off_by_a_crash_does_not_swallow_the_next_one(state: StateFolder) -> None:
    with (state.path / "history.jsonl").open("wb") as handle:
        handle.write('{"model": 2, "reason": "é'.encode()[:-1])
    approve(state, 3)
    approve(state, 4)
    assert [line.model for line in state.models.history()] == [3, 4]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
def test_only_the_owner_can_read_the_history_whatever_the_umask(state: StateFolder, umask: int) -> None:
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


def test_a_line_that_does_not_fit_on_the_disk_leaves_the_others_intact(
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
        patch.setattr("client_agent.state.decisions.os.write", full)
        with pytest.raises(OSError, match="No space"):
            approve(state, 2)
    approve(state, 3)
    assert [line.model for line in state.models.history()] == [1, 3]
    assert (state.path / "history.jsonl").read_text().count("\n") == 2


def test_the_history_of_a_flood_of_models_is_bounded_and_keeps_approved_ones(
    state: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "MAX_BYTES", 20_000)
    monkeypatch.setattr(decisions, "_KEPT_LINES", 10)
    state.models.save(bundle(1), keep=2)
    approve(state, 1)
    for number in range(1000):
        state.models.add_decision(
            GateDecision(model=1, digest=f"{number:064x}", with_offset=None, without_offset=None, served=False)
        )
    assert (state.path / "history.jsonl").stat().st_size < 21_000
    assert [kept.key.number for kept in state.models.servable()] == [1]
    assert [line.digest for line in state.models.history()][-10:] == [f"{number:064x}" for number in range(990, 1000)]


def test_many_models_of_one_number_are_read_in_linear_time(state: StateFolder) -> None:
    """Comparing each line with all others would delay every start by minutes."""
    line = GateDecision(model=1, digest="%", with_offset=None, without_offset=None, served=False).model_dump_json()
    text = "\n".join(line.replace("%", f"{number:064x}") for number in range(50_000))
    (state.path / "history.jsonl").write_text(text)
    assert len(state.models.history()) == 50_000


LINES = st.builds(
    GateDecision,
    model=st.integers(0, 1),
    digest=st.sampled_from(["", "a", "b"]),
    fingerprint=st.sampled_from(["", "x", "y"]),
    with_offset=st.none(),
    without_offset=st.none(),
)


@given(st.lists(LINES, max_size=12))
def test_the_last_line_about_each_bundle_counts(lines: list[GateDecision]) -> None:
    expected: list[GateDecision] = []
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
        assert decisions.read_decisions(Path(file.name)) == expected
