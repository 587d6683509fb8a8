"""Locks on files and folders."""

import subprocess
import sys
from pathlib import Path

import pytest

from shared.system.files import is_locked, locked

BUSY = RuntimeError("another one holds it")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_lock_is_held_for_the_block_and_never_blocks(tmp_path: Path, kind: str) -> None:
    path = tmp_path if kind == "folder" else tmp_path / "lock"
    with locked(path, BUSY):
        assert is_locked(path)
        with pytest.raises(RuntimeError, match="another one holds it"), locked(path, BUSY):
            pass
    assert not is_locked(path)
    with locked(path, BUSY):
        pass


def test_a_lock_file_is_for_its_owner_only(tmp_path: Path) -> None:
    with locked(tmp_path / "lock", BUSY):
        assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


def test_a_missing_file_is_not_locked(tmp_path: Path) -> None:
    assert not is_locked(tmp_path / "lock")
    assert not (tmp_path / "lock").exists()


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holding = (
        "import sys, time; from pathlib import Path; from shared.system.files import locked\n"
        "with locked(Path(sys.argv[1]), RuntimeError()): print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", holding, path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert is_locked(path)
        process.kill()
    assert not is_locked(path)
