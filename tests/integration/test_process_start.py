"""How processes start: what workers inherit, and that no signal gets lost."""

import re
from pathlib import Path

import pytest
from support import interrupts
from support.processes import LoggedProcess
from support.waiting import eventually

SECRETS = {
    "DISTRANS_ADMIN_TOKEN": "an-admin-token-for-tests",
    "DISTRANS_SCRAPE_TOKEN": "a-scrape-token-for-tests",
    "DISTRANS_DB_PASSWORD": "a-password-for-tests",
}


def serve(folder: Path) -> list[str | Path]:
    return ["distrans-server", "serve", "--port", "0", "--data-dir", folder]


def workers_of(process_id: int) -> list[Path]:
    """Return the /proc folders of the processes it has spawned."""
    children = Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()
    folders = [Path(f"/proc/{child}") for child in children]
    return [folder for folder in folders if "spawn_main" in (folder / "cmdline").read_text()]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads environments in /proc")
def test_workers_have_no_secret_in_their_environment(tmp_path: Path) -> None:
    """Not even one that the operator set in the coordinator's environment."""
    process = LoggedProcess(
        [*serve(tmp_path), "--workers", "2"], DISTRANS_DB=f"sqlite:///{tmp_path / 'with-a-password.db'}", **SECRETS
    )
    process.wait_for_line("Started parent process")
    eventually(lambda: len(workers_of(process.process.pid)) == 2)
    workers = workers_of(process.process.pid)
    seen = [(worker / name).read_text() for worker in workers for name in ("environ", "cmdline")]
    process.stop()
    assert "PATH=" in seen[0]
    for secret in (*SECRETS.values(), "with-a-password"):
        assert not any(secret in text for text in seen), secret


class TestInterrupts:
    """SIGINT at any point during startup ends the program, even where a library swallows the exception."""

    @pytest.mark.parametrize(
        "point",
        [
            "open_database",
            "connection_limits",
            "listen",
            "Server.run",
            "Server.capture_signals",
            "create_app",
            "ChangeNotifier.start",
            "Server.main_loop",
        ],
    )
    def test_sigint_stops_the_coordinator_at_any_point_of_its_start(self, tmp_path: Path, point: str) -> None:
        self.ends(LoggedProcess(serve(tmp_path), forked=True, **{interrupts.VARIABLE: point}))

    def test_sigint_stops_a_coordinator_that_is_loading_libraries(self, tmp_path: Path) -> None:
        command = [*interrupts.program("server"), *serve(tmp_path)[1:]]
        self.ends(LoggedProcess(command, **{interrupts.VARIABLE: "server/service/settings.py"}))

    def test_sigint_stops_a_coordinator_whose_workers_are_starting(self, tmp_path: Path) -> None:
        command = [*interrupts.program("server"), *serve(tmp_path)[1:], "--workers", "2"]
        self.ends(LoggedProcess(command, **{interrupts.VARIABLE: "Process.start"}))

    def test_sigint_stops_an_agent_that_is_loading_torch(self, tmp_path: Path) -> None:
        command = [*interrupts.program("client_agent"), "run", "--state", tmp_path]
        self.ends(LoggedProcess(command, **{interrupts.VARIABLE: "torch/__init__.py"}))

    @staticmethod
    def ends(process: LoggedProcess) -> None:
        try:
            code = process.wait(30)
        except BaseException:
            process.kill()
            raise
        assert code in (0, -2), process.lines
        assert not [line for line in process.lines if re.search("Traceback|ERROR", line)]
