"""The parts of the paper without training: bytes, splits and the two motivating examples."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from lab.experiments.communication import communication_table, model_bytes
from lab.experiments.distribution import distribution_table
from lab.experiments.experiment import find_experiment, load_experiment
from lab.experiments.motivation import cosine_example, linear_example
from lab.experiments.report import write_report


def test_byte_table_has_measured_and_published_bytes() -> None:
    assert model_bytes("resnet50") == (94_326_992, 94_408_912)
    table = communication_table()
    assert (
        "| resnet50 | 94,326,992 | 94,408,912 | 49,280 | 0.139% | 94,326,992 | 94,408,912 | 49,280 | 0.139% |" in table
    )
    assert "| lenet | 4,342,328 | 4,346,328 | 49,280 | 1.227% |" in table


def test_offsets_bring_the_losses_of_two_cosines_closer() -> None:
    example = cosine_example()
    before, after = (np.abs(losses[0] - losses[1]).mean() for losses in (example.plain, example.shifted))
    assert after < before
    for client, truth in enumerate((1.0, 2.0)):  # without an offset, each client's best w is its true one
        assert abs(example.weights[example.plain[client].argmin()] - truth) < 0.05


def test_offset_helps_a_linear_model_only_against_a_constant() -> None:
    def loss(with_offsets: bool, means: tuple[float, float]) -> float:
        return float(linear_example(with_offsets=with_offsets, noise_means=means).losses[-1])

    assert loss(True, (1.0, -1.0)) < 0.5 * loss(False, (1.0, -1.0))
    assert abs(loss(True, (0.0, 0.0)) - loss(False, (0.0, 0.0))) < 0.05


def test_splits_of_the_papers_figure_have_its_dh() -> None:
    lines = distribution_table(load_experiment(find_experiment(Path("fig-distribution")))).splitlines()[2:]
    cells = [[part.strip() for part in line.strip("|").split("|")] for line in lines]
    assert [cell[1:] for cell in cells] == [
        ["0%", "10", "10"],
        ["40%", "6", "6"],
        ["60%", "4", "4"],
        ["100%", "1", "1"],
    ]


@pytest.mark.parametrize("name", ["motivation", "fig-distribution"])
def test_report_without_federations_has_its_figure(name: str, tmp_path: Path) -> None:
    shutil.copyfile(find_experiment(Path(name)), tmp_path / "experiment.toml")
    assert f"{name}.svg" in write_report(tmp_path, tmp_path).read_text()
    assert (tmp_path / f"{name}.svg").exists()
