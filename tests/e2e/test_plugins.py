"""A user's backbone from DISTRANS_PLUGINS, in a project that has packages with the same names as ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
BACKBONE = """
from torch import nn

def build(channels, height, width):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, 12), nn.Tanh())
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a backbone, and a `shared` and a `server` that must never be imported."""
    for name in ("shared", "server"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise AssertionError('imported')\n")
    (tmp_path / "own_nets.py").write_text(BACKBONE)
    return tmp_path


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / command[0], *command[1:]],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_coordinator_and_agent_train_a_backbone_from_the_plugins_folder(project: Path) -> None:
    options = ("--backbone", "own_nets:build", "--clients", "1", "--dh", "1", "--rounds", "1")
    result = run("distrans-lab", "demo", *options, cwd=project, DISTRANS_PLUGINS=str(project))
    assert (result.returncode, result.stderr) == (0, "")
    assert "distrans on own_nets:build" in result.stdout


def test_backbone_outside_the_plugins_folders_is_refused_with_the_next_step(project: Path) -> None:
    (project / "plan.toml").write_text(
        'name = "own"\nclasses = ["a", "b"]\n[image]\nchannels = 1\nheight = 8\nwidth = 8\n'
        '[model]\nbackbone = "own_nets:build"\n'
    )
    assert run("distrans-server", "db", "upgrade", cwd=project).returncode == 0
    result = run("distrans-server", "federation", "create", "plan.toml", cwd=project)
    assert result.returncode == 1
    assert result.stderr == (
        "error: 'own_nets:build' cannot be imported: No module named 'own_nets'. Searched the installed packages and "
        "DISTRANS_PLUGINS (not set). Install 'own_nets', or add the folder that contains it to DISTRANS_PLUGINS, on "
        "the coordinator and at every site.\n"
    )
