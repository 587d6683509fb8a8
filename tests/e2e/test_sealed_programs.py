"""Both programs as their images run them, but without Docker, and with all logging on: no secret may be logged."""

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.agents import write_digits
from support.coordinator import Coordinator
from support.processes import PROGRAMS, LoggedProcess
from support.sealed_programs import seal

from client_agent.coordinator.enrollment import join_federation
from client_agent.state.folder import StateFolder
from shared.contract.plan import validate_plan
from shared.http.client_connection import Connection

TOKEN = "an-admin-token-from-a-file"
END = ("--exit-when-finished", "--log-level", "debug")
PLAN = validate_plan(
    {
        "name": "digits",
        "classes": ["0", "1"],
        "image": {"channels": 1, "height": 16, "width": 16},
        "training": {"batch_size": 16},
        "rounds": {"count": 1, "min_clients": 1, "deadline_s": 300},
    }
)


class SealedCoordinator(LoggedProcess, Coordinator):
    """Start it with the image's command on a free port, and the admin token in a file."""

    def __init__(self, prefix: list[str], empty: Path, data: Path, token_file: Path) -> None:
        super().__init__(
            [*prefix, PROGRAMS / "distrans-server", "serve", "--port", "0", "--log-level", "debug"],
            cwd=empty,
            DISTRANS_DATA_DIR=str(data),
            DISTRANS_ADMIN_TOKEN_FILE=str(token_file),
            HOME="/nonexistent",
            PYTHONDONTWRITEBYTECODE="1",
        )
        url = self.wait_for_line(r"listening on (\S+)")
        self.http = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60, trust_env=False
        )

    def admin(self, method: str, path: str, **options: object) -> object:
        answer = self.http.request(method, path, **options)  # type: ignore[arg-type]
        assert answer.is_success, answer.text
        return answer.json()


@pytest.fixture
def place() -> Iterator[Path]:
    """Return a folder that other users can enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_a_federation_runs_with_the_images_commands(place: Path) -> None:
    empty, data, state_folder = place / "empty", place / "data", place / "state"
    empty.mkdir(mode=0o555)
    token_file = place / "admin-token"
    token_file.write_text(TOKEN + "\n")
    prefix = seal(data)
    for folder, can in ((empty, False), (data, True)):
        done = subprocess.run([*prefix, "touch", folder / "probe"], capture_output=True)
        assert (done.returncode == 0) is can
    coordinator = SealedCoordinator(prefix, empty, data, token_file)
    try:
        coordinator.create(PLAN)
        invite = coordinator.admin("POST", "/v1/federations/digits/invites")["token"]  # type: ignore[index]
        images = write_digits(place / "images", ("0", "1"), every=8)
        state = StateFolder(state_folder)
        join_federation(state, Connection(server=str(coordinator.http.base_url)), invite, "left", str(images))
        client_token = state.identity().token
        agent = LoggedProcess(
            [*seal(state_folder), PROGRAMS / "distrans-agent", "run", "--port", "0", "--device", "cpu", *END],
            cwd=empty,
            DISTRANS_AGENT_STATE=str(state_folder),
            HOME="/nonexistent",
            NO_PROXY="*",
            PYTHONDONTWRITEBYTECODE="1",
        )
        assert agent.wait() == 0, agent.lines
        assert coordinator.show("digits").state == "finished"
    finally:
        code = coordinator.stop()
        coordinator.http.close()
    assert code == 0
    assert list(empty.iterdir()) == []
    output = "\n".join(coordinator.lines + agent.lines)
    assert "DEBUG" in "\n".join(agent.lines)
    for secret in (TOKEN, invite, client_token):
        assert secret not in output
        assert secret[-20:] not in output  # nor part of it
