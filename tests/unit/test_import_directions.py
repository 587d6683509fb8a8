"""Imports point one way: shared ← server, shared ← client_agent, all three ← lab; see pyproject.toml."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_they_do() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


def test_they_do_in_a_copy(copy: Path) -> None:
    assert lint_imports(copy).returncode == 0


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("shared/seeds.py", "import server", "Programs stand on shared"),
        ("shared/seeds.py", "from client_agent import __main__", "Programs stand on shared"),
        ("shared/methods/base.py", "import lab.demo", "Programs stand on shared"),
        ("server/pretrained.py", "import client_agent", "Programs stand on shared"),
        ("client_agent/__main__.py", "import server.pretrained", "Programs stand on shared"),
        ("server/__main__.py", "import lab", "Programs stand on shared"),
        ("shared/wire.py", "import httpx", "shared does no SQL, and no HTTP"),
        ("shared/plan.py", "from sqlalchemy import select", "shared does no SQL, and no HTTP"),
        ("shared/plan.py", "import torch", "Commands that only read"),
    ],
)
def test_a_wrong_import_is_found(copy: Path, file: str, line: str, contract: str) -> None:
    with (copy / file).open("a") as source:
        source.write(f"\n{line}\n")
    result = lint_imports(copy)
    assert result.returncode == 1
    assert any(text.startswith(contract) and " BROKEN" in text for text in result.stdout.splitlines())


def test_a_wrong_import_inside_the_server_is_found(copy: Path) -> None:
    """The layers need not exist; where two do, the lower one must not know the upper one."""
    for layer in ("core", "store"):
        (copy / "server" / layer).mkdir(exist_ok=True)
        (copy / "server" / layer / "__init__.py").touch()
    assert lint_imports(copy).returncode == 0
    (copy / "server" / "core" / "wrong.py").write_text("import server.store\n")
    result = lint_imports(copy)
    assert result.returncode == 1
    assert "server.core.wrong -> server.store" in result.stdout
