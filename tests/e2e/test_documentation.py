"""Commands in the documentation work when pasted, and what it mentions exists."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.launcher import warm_programs
from typer.main import get_command

from client_agent.__main__ import app as agent
from lab.__main__ import app as lab
from lab.plan_reference import reference
from server.__main__ import app as server

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
PROGRAMS: dict[str, Any] = {
    "distrans-server": get_command(server),
    "distrans-agent": get_command(agent),
    "distrans-lab": get_command(lab),
}

# How blocks of these kinds are run; one whose program is not installed is skipped.
RUN_WITH = {
    "sh": ("bash", "{block}"),
    "python": ("python", "python - <<'END_OF_EXAMPLE'\n{block}END_OF_EXAMPLE\n"),
    "javascript": ("node", "node --input-type=module - <<'END_OF_EXAMPLE'\n{block}END_OF_EXAMPLE\n"),
}
SHOWN = {"", "json", "ini", "toml"}  # these hold no commands
# Why the lines of `console` blocks are not run:
NOT_RUN = {
    "make build": "test_installed_wheel.py builds the wheel, installs it and starts it",
    "make check": "`make test` starts with it",
    "make coverage": "runs this test",
    "make demo": "installs for minutes; test_command_lines.py runs the demo itself",
    "make docs": "test_documentation_site.py builds the site",
    "make format": "changes files",
    "make test": "runs this test",
    "cp --archive --link": "copies a folder that the guide's coordinator does not have; test_backup.py restores spools",
    "pg_dump": "needs a PostgreSQL server",
    "distrans-server serve": "runs until it is stopped; the README's walk runs it in the background",
    "distrans-lab run": "takes hours or days; test_runs.py runs experiments of a few rounds",
    "distrans-lab report": "needs the results of such a run",
    "distrans-lab bench": "takes minutes; test_command_lines.py runs it with a single step",
    "distrans-lab demo": "takes half an hour; test_command_lines.py runs it with two rounds",
}
# The guides continue where the README ends. The site of the site guide joins a separate federation.
BEFORE = {
    "site-guide.md": """\
sed -e 's/"digits"/"tiles"/' -e 's/^count.*/count = 1/' -e 's/^min_clients.*/min_clients = 1/' plan.toml > tiles.toml
distrans-server federation create tiles.toml
COORDINATOR=http://127.0.0.1:8400 INVITE=$(distrans-server invite create tiles)
distrans-server federation start tiles
ln -s sites/site-001 tiles
""",
}
WALK = ["README.md", "site-guide.md", "predict-api.md", "operator-guide.md", "reproducing.md"]
FOREIGN_OPTIONS = {"--database"}  # Flower's, in the README
PORTS = ("8400", "8500", "8501", "8502")


@dataclass(frozen=True)
class Block:
    kind: str
    text: str


def blocks(document: Path) -> Iterator[Block]:
    for kind, text in re.findall(r"^```(\S*)\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL):
        yield Block(kind, text)


def commands(block: Block) -> list[str]:
    return [line for line in block.text.splitlines() if re.match(r"(\$ )?(distrans-|make |curl |python |pg_)", line)]


def is_missing(program: str) -> bool:
    if shutil.which(program) is not None:
        return False
    if os.environ.get("CI") == "true":
        pytest.fail(f"{program} not found")
    return True


def walk_script() -> str:
    """Return all blocks that can be run, as one script that announces each."""
    parts = []
    for name in WALK:
        parts.append(BEFORE.get(name, ""))
        document = next(path for path in DOCUMENTS if path.name == name)
        for number, block in enumerate(blocks(document), start=1):
            if block.kind not in RUN_WITH:
                continue
            program, form = RUN_WITH[block.kind]
            first_word = "sqlite3" if block.text.startswith("sqlite3 ") else program
            if not is_missing(first_word):
                parts += [f"echo; echo '=== {name}, block {number}'\n", form.format(block=block.text)]
    script = "".join(parts)
    for port in PORTS:
        assert port in script
        with socket.create_server(("127.0.0.1", 0)) as listener:
            script = script.replace(port, str(listener.getsockname()[1]))
    return script


def test_documented_commands_work_when_pasted(tmp_path: Path) -> None:
    """One walk through the README and the guides, with a real coordinator and real agents."""
    if is_missing("bash") or is_missing("curl"):
        pytest.skip("the blocks need bash and curl")
    for name in ("tile.png", "a.png", "b.jpg"):
        Image.new("L", (8, 8), 128).save(tmp_path / name)
    with warm_programs() as programs:
        path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", walk_script()],
            cwd=tmp_path,
            env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "no_proxy": "*"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        watchdog = threading.Timer(300, lambda: os.killpg(process.pid, signal.SIGKILL))
        watchdog.start()
        try:
            assert process.stdout is not None
            output = process.stdout.read()  # background programs write to files, so this ends with the script
            assert process.wait() == 0, output
        finally:
            watchdog.cancel()
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    assert "digits: finished, 3 of 3 rounds, 2 clients, DH 100%" in output
    calls = re.findall(r'"prior":"\w+","temperature":[\d.]+\},"predictions":\[\{"index":0,"label":"\d"', output)
    assert len(calls) == 3  # one in the README, two in predict-api.md
    labels = re.search(r"predict-api.md, block 3\n(\d)\n(?:\n=== predict-api.md, block 4\n(\d)\n)?", output)
    assert labels is not None, output
    assert labels[2] in (labels[1], None)  # the same image, from Python and from JavaScript
    assert '"name":"lung-nodules","state":"running"' in output
    assert (tmp_path / "lung-nodules.zip").stat().st_size > 0
    assert "Traceback" not in output


def test_every_block_is_run_or_has_a_reason_not_to() -> None:
    used = set()
    for document in DOCUMENTS:
        for block in blocks(document):
            where = f"{document.name}: {block.text[:60]!r}"
            if block.kind in RUN_WITH:
                assert document.name in WALK, where
            elif block.kind == "console":
                for line in block.text.splitlines():
                    reasons = [start for start in NOT_RUN if line.startswith(start)]
                    assert len(reasons) == 1, where
                    used.add(reasons[0])
            else:
                assert block.kind in SHOWN, where
                assert commands(block) == [], where
    assert used == set(NOT_RUN)


def test_plan_reference_matches_the_code() -> None:
    """To update it: python -m lab.plan_reference > docs/plan-reference.md"""
    assert (ROOT / "docs" / "plan-reference.md").read_text() == reference()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_have_a_target(document: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)(?:#([^)]+))?\)", document.read_text())
    assert [target for target, _ in targets if not (document.parent / target).exists()] == []
    for target, anchor in targets:
        assert not anchor or anchor in anchors_of(document.parent / target), f"{target}#{anchor}"


def anchors_of(document: Path) -> set[str]:
    """Return the anchors that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def options_of(command: Any) -> set[str]:
    """Return the options of a command and of all its subcommands."""
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*(options_of(below) for below in getattr(command, "commands", {}).values()), {"--help"})


def faults(program: str, words: list[str]) -> Iterator[str]:
    command = PROGRAMS[program]
    for word in words:
        below = getattr(command, "commands", {})
        if below and re.fullmatch("[a-z]+", word):
            if word not in below:
                yield f"{program} has no command {word}"
                return
            command = below[word]
        elif (option := word.partition("=")[0]).startswith("--") and option not in options_of(command):
            yield f"{program} {command.name} has no option {option}"


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "docs" / "troubleshooting.toml"], ids=lambda path: path.name)
def test_commands_and_options_in_documents_exist(document: Path) -> None:
    text = document.read_text()
    found = [
        fault
        for program, rest in re.findall(r"(?<![./\w])(distrans-(?:server|agent|lab))((?: [^\s`|;&)]+)*)", text)
        for fault in faults(program, rest.split())
    ]
    assert found == []
    known = FOREIGN_OPTIONS.union(*map(options_of, PROGRAMS.values()))
    named = set(re.findall(r"`(--[a-z][a-z-]+)", text))
    assert named - known == set()


@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if path.name != "moved.md"], ids=lambda path: path.name
)
def test_files_named_in_documents_exist(document: Path) -> None:
    folders = "shared|server|client_agent|lab|migrations|deploy|docs|paper|tests"
    named = set(re.findall(rf"`((?:{folders})/[\w./-]*[\w/])`", document.read_text()))
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_walks_state_how_many_files_they_visit() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    sections = text.partition("## Walks")[2].partition("\n## ")[0].split("\n### ")[1:]
    for section in sections:
        steps = "\n".join(re.findall(r"^\d+\. .*(?:\n +.*)*", section, re.MULTILINE))
        stated = re.search(r"^(\d+) files", section, re.MULTILINE)
        assert stated is not None, section
        files = re.findall(r"`([\w/]+\.py)`", steps)
        assert (len(files), len(set(files))) == (int(stated[1]), int(stated[1])), section
    assert len(sections) == 4
