"""The names by which the project's experiments are found."""

from pathlib import Path

import pytest

from lab.experiments.experiment import experiment_files, find_experiment
from shared.contract.errors import DistransError

TABLE1 = next(file for file in experiment_files() if file.stem == "table1")


@pytest.mark.parametrize("given", ["table1", "table1.toml", "paper/table1.toml", "./paper/table1.toml"])
def test_experiment_of_the_project_is_found_from_anywhere(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_experiment(Path(given)) == TABLE1


@pytest.mark.parametrize("given", ["foo/bar/table1.toml", "papers/table1.toml", "/paper/table1.toml", "../table1"])
def test_path_that_does_not_exist_does_not_mean_a_file_of_the_same_name(given: str) -> None:
    with pytest.raises(DistransError, match=rf"There is no file {given}\. .*table1"):
        find_experiment(Path(given))


def test_existing_file_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("table1.toml").touch()
    assert find_experiment(Path("table1.toml")) == Path("table1.toml")
