"""Programs started where somebody else's `shared` or `server` comes first on the path."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PROGRAMS = {"distrans-server": "server", "distrans-agent": "client_agent", "distrans-lab": "lab"}


def run(command: list[str | Path], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False
    )


def write_package(folder: Path, name: str, text: str = "raise AssertionError('imported')\n") -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(text)
    return folder / name


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("own", [False, True])
def test_foreign_package_on_pythonpath_is_named_in_one_line(program: str, own: bool, tmp_path: Path) -> None:
    """Both for `shared` and for a package with the name of the program itself, which lacks our submodules."""
    package = PROGRAMS[program] if own else "shared"
    culprit = write_package(tmp_path / "project", package)
    result = run([BIN / program, "--version"], tmp_path, PYTHONPATH="elsewhere:project")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f"error: The module '{package}' was loaded from {culprit}, not from DisTrans ({ROOT / package}). Remove "
        f"{culprit.parent} from PYTHONPATH; use DISTRANS_PLUGINS for folders with your own backbones.\n"
    )


def test_foreign_module_that_is_a_single_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "shared.py").write_text("raise AssertionError('imported')\n")
    result = run([BIN / "distrans-server", "--version"], tmp_path, PYTHONPATH=str(tmp_path))
    assert result.stderr.startswith(f"error: The module 'shared' was loaded from {tmp_path / 'shared.py'}, not")


@pytest.mark.parametrize("module", PROGRAMS.values())
def test_foreign_package_in_the_current_folder_is_named(module: str, tmp_path: Path) -> None:
    """`python -m` puts the current folder first."""
    culprit = write_package(tmp_path, "shared")
    result = run([sys.executable, "-m", module, "--version"], tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f"error: The module 'shared' was loaded from {culprit}, not from DisTrans ({ROOT / 'shared'}). "
        "Start DisTrans from another folder.\n"
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_packages_that_a_program_does_not_import_may_share_its_names(program: str, tmp_path: Path) -> None:
    for name in {"server", "client_agent", "lab"} - {PROGRAMS[program]} if program != "distrans-lab" else {"tests"}:
        write_package(tmp_path, name)
    (tmp_path / "shared").mkdir()  # without __init__.py it shadows nothing
    result = run([BIN / program, "--version"], tmp_path, PYTHONPATH=str(tmp_path))
    assert (result.returncode, result.stderr) == (0, "")


def install(folder: Path, files: dict[str, str], distribution: str) -> None:
    """Write files as if pip had installed them for a distribution."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    information = folder / f"{distribution}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (information / "RECORD").write_text("".join(f"{name},,\n" for name in files))


START = "import sys; sys.path.insert(1, sys.argv.pop(1)); import distrans; distrans.server()"


def test_distribution_that_brings_the_same_package_is_named(tmp_path: Path) -> None:
    install(tmp_path, {"shared/__init__.py": ""}, "other-tools")
    result = run([sys.executable, "-c", START, tmp_path, "--version"], ROOT.parent)
    assert result.returncode == 1
    assert result.stderr.endswith("other-tools and DisTrans need separate virtual environments.\n")


def test_distribution_that_overwrote_our_files_is_named(tmp_path: Path) -> None:
    install(tmp_path, {"shared/__init__.py": "", "server/__init__.py": ""}, "other-tools")
    for file in ("distrans.py", "server/__main__.py", "shared/system/command_line.py", "shared/system/__init__.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text((ROOT / file).read_text())
    result = run([sys.executable, "-c", START, tmp_path, "--version"], tmp_path.parent)
    assert result.returncode == 1
    assert result.stderr == (
        "error: No module named 'server.commands'. other-tools also installs a package named 'server'. "
        "Reinstall DisTrans in a separate virtual environment.\n"
    )


def test_missing_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "distrans.py").write_text((ROOT / "distrans.py").read_text())
    (tmp_path / "shared").mkdir()  # as left behind by uninstalling a distribution that had its own
    command = [sys.executable, "-S", "-c", START, tmp_path]
    result = run([*command], tmp_path.parent)
    assert (result.returncode, result.stderr) == (
        1,
        f"error: The module 'shared' is missing from {tmp_path}. Reinstall DisTrans.\n",
    )
