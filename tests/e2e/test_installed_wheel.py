"""The wheel that `make build` builds, installed into a fresh virtual environment.

Dependencies come from the environment that runs the tests. Its .pth files are not read, so the clone stays invisible.
"""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import httpx
import pytest
from support.processes import LoggedProcess

from shared import __version__

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("distrans", "shared", "server", "client_agent", "lab")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    command = ["make", "--old-file=.venv/.installed", "build", f"DIST={folder}", f"BIN={Path(sys.executable).parent}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert {file.name for file in folder.iterdir()} == {
        f"distrans-{__version__}-py3-none-any.whl",
        f"distrans-{__version__}.tar.gz",
    }
    return folder


@pytest.fixture(scope="module")
def environment(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the programs of a virtual environment that has the wheel."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    python, (wheel,) = folder / "bin" / "python", dist.glob("*.whl")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel]
    subprocess.run(install, check=True, env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def run(program: Path, *arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def test_only_the_installed_copy_is_imported(environment: Path, tmp_path: Path) -> None:
    code = f"import {', '.join(MODULES)}\nprint(*({', '.join(f'{name}.__file__' for name in MODULES)}), sep='\\n')"
    result = run(environment / "python", "-c", code, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    files = [Path(line) for line in result.stdout.splitlines()]
    assert len(files) == len(MODULES)
    assert all(file.is_relative_to(environment.parent) for file in files), files


@pytest.mark.parametrize("program", ["distrans-server", "distrans-agent", "distrans-lab"])
def test_every_program_starts(program: str, environment: Path, tmp_path: Path) -> None:
    result = run(environment / program, "--version", cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"distrans {__version__}\n", "")
    result = run(environment / program, "--help", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"Usage: {program}" in result.stdout


def test_coordinator_creates_its_database_and_becomes_ready(environment: Path, tmp_path: Path) -> None:
    upgraded = run(environment / "distrans-server", "db", "upgrade", "--data-dir", tmp_path, cwd=tmp_path)
    assert (upgraded.returncode, upgraded.stderr) == (0, "")
    serving = LoggedProcess(
        [environment / "distrans-server", "serve", "--port", "0", "--data-dir", str(tmp_path)], tmp_path
    )
    try:
        url = serving.wait_for_line(r"listening on (\S+)")
        serving.wait_for_line("Application startup complete")
        assert httpx.get(f"{url}/readyz", trust_env=False).status_code == 200
    finally:
        serving.stop()


def test_lab_finds_the_paper_s_experiments(environment: Path, tmp_path: Path) -> None:
    result = run(environment / "distrans-lab", "run", "no-such-experiment", cwd=tmp_path)
    assert result.returncode == 1
    missing = [file.stem for file in (ROOT / "paper").glob("*.toml") if file.stem not in result.stderr]
    assert not missing, result.stderr


def test_wheel_is_typed_licensed_and_has_no_tests(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"distrans-{__version__}.dist-info/METADATA").decode()
    assert {f"{package}/py.typed" for package in MODULES[1:]} <= names
    assert {str(file.relative_to(ROOT)) for file in _page_files()} <= names
    assert {name.partition("/")[0] for name in names} == {
        "distrans.py",
        *MODULES[1:],
        f"distrans-{__version__}.dist-info",
    }
    assert "License-Expression: Apache-2.0\nLicense-File: LICENSE\n" in metadata


def _page_files() -> list[Path]:
    """Return the templates, style sheets and scripts, which are not Python."""
    folders = ("shared", "server", "client_agent")
    files = (file for folder in folders for file in (ROOT / folder).rglob("*"))
    found = [file for file in files if file.suffix in (".css", ".html", ".js", ".svg")]
    assert found
    return found


def test_source_distribution_has_what_its_tests_need(dist: Path) -> None:
    (file,) = dist.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = [
        path
        for pattern in ("tests/**/*.py", "docs/**/*.md", "deploy/**/*", "paper/*", "migrations/**/*.py")
        for path in ROOT.glob(pattern)
        if path.is_file()
    ]
    needed += [
        ROOT / name
        for name in (
            "Makefile",
            "alembic.ini",
            "compose.yaml",
            "Dockerfile",
            ".dockerignore",
            ".pre-commit-config.yaml",
            ".ci/run",
            ".gitignore",
            "README.md",
            "LICENSE",
        )
    ]
    assert {str(path.relative_to(ROOT)) for path in needed} <= names
