"""The README's walk works when pasted, and generated pages are current."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lab.plan_reference import reference

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def shell_blocks(text: str) -> str:
    return "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL))


def test_the_readmes_walk_as_three_roles(tmp_path: Path) -> None:
    missing = [tool for tool in ("bash", "curl") if shutil.which(tool) is None]
    if missing:
        message = f"{', '.join(missing)} not found"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    script = shell_blocks((ROOT / "README.md").read_text())
    for port in ("8400", "8501", "8502"):
        assert port in script
        script = script.replace(port, str(free_port()))
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "no_proxy": "*",
    }
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    watchdog = threading.Timer(240, lambda: os.killpg(process.pid, signal.SIGKILL))
    watchdog.start()
    try:
        assert process.stdout is not None
        output = process.stdout.read()  # background programs write to files, so this ends with the script
        assert process.wait() == 0, output
        assert "5 of 5 rounds" in output
        assert '"predictions":[{"index":0,"label":' in output
        assert '"offset_digest":"' in output
    finally:
        watchdog.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_the_plan_reference_is_current() -> None:
    """When this fails: python -m lab.plan_reference > docs/plan-reference.md"""
    assert (ROOT / "docs" / "plan-reference.md").read_text() == reference()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text())
    assert [target for target in targets if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_documents_exist(document: Path) -> None:
    """Every `distrans-… command` and every --option that the documents name is in that program's help."""
    from typer.main import get_command

    from client_agent.__main__ import app as agent
    from lab.__main__ import app as lab
    from server.__main__ import app as server

    programs = {"distrans-server": server, "distrans-agent": agent, "distrans-lab": lab}
    for program, words in re.findall(r"(distrans-(?:server|agent|lab)) ((?:[a-z]+ ?)+)", document.read_text()):
        command = get_command(programs[program])
        for word in words.split():
            known = getattr(command, "commands", None)
            if known is None:
                break
            assert word in known, f"{document.name}: {program} {words}"
            command = known[word]
