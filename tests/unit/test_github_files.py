"""The workflow, issue templates and dependabot configuration in .github."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
YAML_FILES = sorted([*GITHUB.rglob("*.yaml"), *GITHUB.rglob("*.yml")])
WORKFLOW: dict[str, Any] = yaml.safe_load((GITHUB / "workflows" / "test.yaml").read_text())
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def steps(job: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = WORKFLOW["jobs"][job]["steps"]
    return found


@pytest.mark.parametrize("file", YAML_FILES, ids=lambda file: file.name)
def test_yaml_can_be_parsed(file: Path) -> None:
    assert isinstance(yaml.safe_load(file.read_text()), dict)


def test_workflow_tests_the_python_versions_in_the_classifiers() -> None:
    tested = WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["python"]
    matches = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line) for line in PROJECT["classifiers"]]
    declared = [match[1] for match in matches if match]
    assert tested == declared
    assert PROJECT["requires-python"] == f">={declared[0]}"


def test_workflow_runs_the_same_script_as_contributors() -> None:
    (command,) = [step["run"] for step in steps("test") if "run" in step]
    assert os.access(ROOT / command, os.X_OK)
    assert (ROOT / command).read_text().splitlines()[-1] == "make test"


def test_workflow_builds_every_image() -> None:
    targets = WORKFLOW["jobs"]["image"]["strategy"]["matrix"]["target"]
    assert targets == re.findall(r"^FROM base AS (\w+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert any(step.get("run", "").startswith("docker build --target ${{ matrix.target }}") for step in steps("image"))


def test_actions_are_pinned_by_major_version() -> None:
    actions = [step["uses"] for job in WORKFLOW["jobs"] for step in steps(job) if "uses" in step]
    assert actions
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+", action) for action in actions), actions


def test_workflow_can_only_read_the_repository() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}


def test_dependabot_watches_every_ecosystem() -> None:
    updates = yaml.safe_load((GITHUB / "dependabot.yml").read_text())["updates"]
    assert {update["package-ecosystem"] for update in updates} == {"pip", "github-actions", "docker"}


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_forms_have_what_github_requires(name: str) -> None:
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert form["name"]
    assert form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
