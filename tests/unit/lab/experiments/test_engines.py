"""All engines give the same results."""

import importlib.util
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.experiments import TEXT, measured, run

ROOT = Path(__file__).resolve().parents[4]


def engines() -> list[Any]:
    declared = any(name.startswith("ray") for name in _extra("test"))
    missing = importlib.util.find_spec("ray") is None
    must = declared and os.environ.get("CI") == "true"
    return ["processes", pytest.param("ray", marks=pytest.mark.skipif(missing and not must, reason="no Ray here"))]


def _extra(name: str) -> list[str]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][name]


@pytest.fixture(scope="module")
def with_failure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with try.toml, three cells of which one diverges, and their sequential run in one/."""
    folder = tmp_path_factory.mktemp("engines")
    bad = '[[methods]]\nlabel = "bad"\nmethod = { name = "fedavg" }\nplan.training.lr = 90'
    text = TEXT.replace("FIGURE", "none").replace("seeds = [0, 1]", "seeds = [0]") + bad
    (folder / "try.toml").write_text(text)
    assert run(folder / "try.toml", folder / "one")[0] == 1
    return folder


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")  # Ray's
@pytest.mark.parametrize("engine", engines())
def test_every_engine_gives_the_same_results_and_reports_failures(
    engine: str, with_failure: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    failures, printed = run(with_failure / "try.toml", tmp_path / "many", engine=engine, workers=2)
    assert failures == 1
    assert "diverged" in printed
    assert measured(tmp_path / "many") == measured(with_failure / "one") != {}


def test_workers_import_nothing_from_the_current_folder(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    Path("server.py").write_text("print('Hello')\n")
    failures, printed = run(file, tmp_path / "out", engine="processes", workers=1, only=("seed=0", "method=FedAvg"))
    assert failures == 0, printed
