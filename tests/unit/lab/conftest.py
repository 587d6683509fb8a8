from pathlib import Path

import pytest
from support.experiments import BASELINES, TEXT, run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small experiment."""
    path = tmp_path / "try.toml"
    path.write_text(TEXT.replace("FIGURE", "curves"))
    return path


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """The folder of a complete run, its failures and its output. Read-only, except for its report."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "try.toml").write_text(TEXT.replace("FIGURE", "curves"))
    return folder / "out", *run(folder / "try.toml", folder / "out")


@pytest.fixture(scope="session")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a complete run with baselines. Read-only, except for its report."""
    folder = tmp_path_factory.mktemp("baselines")
    (folder / "try.toml").write_text(BASELINES)
    assert run(folder / "try.toml", folder / "out")[0] == 0
    return folder / "out"
