"""What pyproject.toml, the Makefile and pre-commit must agree on."""

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

import shared

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOOLS: dict[str, Any] = PROJECT["tool"]


def test_every_tool_lists_the_same_packages() -> None:
    module, *packages = TOOLS["hatch"]["build"]["targets"]["wheel"]["only-include"]
    assert TOOLS["importlinter"]["root_packages"] == packages
    assert TOOLS["coverage"]["run"]["source"] == packages
    assert TOOLS["mypy"]["packages"] == [*packages, "docs._tools"]
    assert [f"{name}.py" for name in TOOLS["mypy"]["modules"]] == [module]
    assert all((ROOT / package / "py.typed").is_file() for package in packages)


def test_installed_version_matches_the_code() -> None:
    installed = importlib.metadata.version("distrans")
    assert installed == shared.__version__, (
        f"{installed} is installed, the code is {shared.__version__}; run `make clean install`"
    )


def make_commands(target: str) -> list[str]:
    """Return the commands of a Makefile target with its variables expanded."""
    text = (ROOT / "Makefile").read_text()
    variables = dict(re.findall(r"^(\w+) *[:?]?= *(.*)$", text, re.MULTILINE))
    recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    assert recipe is not None
    commands = recipe[1]
    while "$(" in commands:
        commands = re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], commands)
    return [line.strip() for line in commands.splitlines()]


def test_pre_commit_runs_what_make_check_runs() -> None:
    """Where pre-commit passes the changed files, make passes all of them."""
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = [hook["entry"] + (" ." if hook.get("pass_filenames", True) else "") for hook in repository["hooks"]]
    assert hooks == make_commands("check")
    assert len(hooks) >= 4


def test_lowest_tests_are_folders_that_exist() -> None:
    match = re.search(r"^LOWEST_TESTS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert match is not None
    assert all((ROOT / folder).is_dir() for folder in match[1].split())


def test_make_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert targets is not None
    listed = set(re.findall(r'^\t@echo "make ([\w-]+) ', text, re.MULTILINE))
    assert listed == set(targets[1].split()) - {"help", "check-migrations"}
