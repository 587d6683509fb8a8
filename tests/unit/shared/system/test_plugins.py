import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.contract.errors import DistransError
from shared.system.plugins import load_function


class PluginError(DistransError):
    pass


def load(name: str) -> object:
    return load_function(name, PluginError, "at this site")


def refusal(name: str) -> PluginError:
    with pytest.raises(PluginError) as caught:
        load(name)
    return caught.value


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Write a file into the second of two folders in DISTRANS_PLUGINS."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("DISTRANS_PLUGINS", f"{tmp_path / 'first'}{os.pathsep}{tmp_path / 'second'}")

    def write_file(name: str, text: str) -> None:
        file = tmp_path / "second" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    yield write_file
    for module in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[module]


def test_function_is_loaded_from_a_package_in_the_second_folder(write: Callable[[str, str], None]) -> None:
    write("own_package/__init__.py", "")
    write("own_package/parts.py", "VALUE = 7\n")
    write("own_package/nets.py", "from own_package.parts import VALUE\ndef build(): return VALUE\n")
    function = load("own_package.nets:build")
    assert callable(function)
    assert function() == 7


def test_modules_in_plugin_folders_never_shadow_ours_or_installed_ones(
    write: Callable[[str, str], None], tmp_path: Path
) -> None:
    for name in ("shared/__init__.py", "server/__init__.py", "httpx.py", "colorsys.py"):
        write(name, "raise AssertionError('shadowed')\n")
    write("own_nets.py", "import colorsys, httpx, server, shared\ndef build(): return 7\n")
    code = (
        "from shared.system.plugins import load_function\nprint(load_function('own_nets:build', RuntimeError, '')())\n"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "7\n", "")


def test_folder_created_after_a_failure_is_found(write: Callable[[str, str], None]) -> None:
    refusal("own_nets:build")
    write("own_nets.py", "def build(): ...\n")
    assert callable(load("own_nets:build"))


@pytest.mark.usefixtures("write")
def test_refusal_names_the_module_the_folders_and_the_next_step(tmp_path: Path) -> None:
    error = refusal("own_nets:build")
    folders = f"{tmp_path / 'first'}{os.pathsep}{tmp_path / 'second'}"
    assert error.message == (
        "'own_nets:build' cannot be imported: No module named 'own_nets'. "
        f"Searched the installed packages and DISTRANS_PLUGINS ({folders})."
    )
    assert error.next_step == (
        "Install 'own_nets', or add the folder that contains it to DISTRANS_PLUGINS, at this site."
    )


def test_refusal_says_that_no_folder_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTRANS_PLUGINS", raising=False)
    assert "DISTRANS_PLUGINS (not set)" in refusal("own_nets:build").message


@pytest.mark.parametrize(
    ("text", "reason", "next_step"),
    [
        ("import no_such_library", "No module named 'no_such_library'", "Install 'no_such_library', or add"),
        ("from shared.nets import Net", "No module named 'shared.nets'", "has a package named 'shared': rename yours"),
        ("from shared import Net", "cannot import name 'Net'", "has a package named 'shared': rename yours"),
        ("1 / 0", "division by zero", "Fix 'own_nets' at this site."),
        ("raise SystemExit('gone')", "gone", "Fix 'own_nets' at this site."),
        ("", "no attribute 'build'", "Fix 'own_nets' at this site."),
    ],
)
def test_refusal_tells_a_missing_module_from_a_broken_one(
    write: Callable[[str, str], None], text: str, reason: str, next_step: str
) -> None:
    write("own_nets.py", text)
    error = refusal("own_nets:build")
    assert reason in error.message
    assert next_step in str(error.next_step)
