import os
import signal
from pathlib import Path

import pytest

from lab.demo import processes
from lab.demo.processes import Processes
from shared.contract.errors import DistransError


def run_code(group: Processes, name: str, code: str) -> Path:
    """Start a child that runs this code once; `timeit` exists in every Python."""
    return group.start(name, "timeit", ["-n", "1", "-r", "1", "-s", "import os, signal, time", code])


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


SLEEP = "print(f'pid {os.getpid()}.', flush=True); time.sleep(600)"


def start_sleeper(group: Processes) -> int:
    return int(group.wait_for(run_code(group, "sleeper", SLEEP), r"pid (\d+)\."))


def test_leaving_the_block_stops_all_programs(tmp_path: Path) -> None:
    with Processes(tmp_path) as group:
        pid = start_sleeper(group)
        assert is_running(pid)
    assert not is_running(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_all_programs(number: signal.Signals, tmp_path: Path) -> None:
    handler, started = signal.getsignal(number), []

    def be_interrupted() -> None:
        with Processes(tmp_path) as group:
            started.append(start_sleeper(group))
            os.kill(os.getpid(), number)
            group.pause(60)

    with pytest.raises(KeyboardInterrupt):
        be_interrupted()
    (pid,) = started
    assert not is_running(pid)
    assert signal.getsignal(number) is handler


def test_program_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_PATIENCE_S", 0.0)
    deaf = f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
    with Processes(tmp_path) as group:
        pid = int(group.wait_for(run_code(group, "deaf", deaf), r"pid (\d+)\."))
    assert not is_running(pid)


def test_early_end_is_reported_with_the_last_lines_of_the_log(tmp_path: Path) -> None:
    with Processes(tmp_path) as group:
        run_code(group, "weak", "print('I cannot', flush=True); os._exit(3)")
        with pytest.raises(DistransError, match=r"^weak ended with code 3: I cannot See .*weak\.log\.$"):
            group.pause(60)


def test_waiting_for_a_line_ends_with_the_program(tmp_path: Path) -> None:
    with Processes(tmp_path) as group:
        log = run_code(group, "weak", "os._exit(3)")
        with pytest.raises(DistransError, match="weak ended with code 3"):
            group.wait_for(log, "never")


def test_settings_of_the_users_own_coordinator_are_not_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTRANS_DB", "postgresql://production")
    monkeypatch.setenv("OTHER", "kept")
    code = "print('seen:', os.environ.get('DISTRANS_DB'), os.environ['OTHER'], flush=True); time.sleep(600)"
    with Processes(tmp_path) as group:
        assert group.wait_for(run_code(group, "child", code), "seen: (.*)") == "None kept"
