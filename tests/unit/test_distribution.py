"""The packages have plain names, so another distribution's `shared` or `server` could take their place unseen."""

import importlib.metadata
import re
import sys
import tomllib
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
import yaml

import shared

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
ADVICE = "Give this project an environment of its own: run `make clean install`, then use .venv/bin."


def found_at(package: str) -> Path | None:
    """The folder that an import of the package would take now."""
    spec = PathFinder.find_spec(package, sys.path)
    return Path(spec.origin).resolve().parent if spec is not None and spec.origin else None


def foreign_owners(package: str) -> set[str]:
    """Other distributions that bring a package of this name; an editable install does not list its own."""
    return set(importlib.metadata.packages_distributions().get(package, [])) - {"distrans"}


class TestPackages:
    @pytest.mark.parametrize("package", PACKAGES)
    def test_are_this_repository_s(self, package: str) -> None:
        place = found_at(package)
        assert place == ROOT / package, (
            f"`import {package}` takes {place or 'nothing'}, not {ROOT / package}. "
            f"Installed distributions that bring it: {sorted(foreign_owners(package)) or 'none'}. {ADVICE}"
        )

    @pytest.mark.parametrize("package", PACKAGES)
    def test_are_nobody_else_s(self, package: str) -> None:
        owners = sorted(foreign_owners(package))
        assert not owners, (
            f"{', '.join(owners)} also installs a package named `{package}`; which of the two is imported depends on "
            f"the order of sys.path. {ADVICE}"
        )

    def test_one_of_another_distribution_would_be_noticed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "shared").mkdir()
        (tmp_path / "shared" / "__init__.py").touch()
        information = tmp_path / "other-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
        (information / "RECORD").write_text("shared/__init__.py,,\n")
        monkeypatch.syspath_prepend(tmp_path)
        assert found_at("shared") == tmp_path.resolve() / "shared"
        assert foreign_owners("shared") == {"other"}

    def test_are_named_alike_by_every_tool(self) -> None:
        tools = PROJECT["tool"]
        assert tools["importlinter"]["root_packages"] == PACKAGES
        assert tools["coverage"]["run"]["source"] == PACKAGES
        assert tools["mypy"]["packages"] == PACKAGES
        assert all((ROOT / package / "__init__.py").is_file() for package in PACKAGES)


def test_version() -> None:
    installed = importlib.metadata.version("distrans")
    assert installed == shared.__version__, (
        f"installed is {installed}, the code is {shared.__version__}; run `make clean install`"
    )


def make_commands(target: str) -> list[str]:
    """The commands of a Makefile target, with the variables put in."""
    text = (ROOT / "Makefile").read_text()
    variables = dict(re.findall(r"^(\w+) *[:?]?= *(.*)$", text, re.MULTILINE))
    recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    assert recipe is not None
    commands = recipe[1]
    while "$(" in commands:
        commands = re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], commands)
    return [line.strip() for line in commands.splitlines()]


def test_pre_commit_runs_what_make_check_runs() -> None:
    """Where pre-commit hands over the changed files, make hands over all of them."""
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = [hook["entry"] + (" ." if hook.get("pass_filenames", True) else "") for hook in repository["hooks"]]
    assert hooks == make_commands("check")
    assert len(hooks) >= 4
