"""The parts of the paper that need no federation: bytes, splits and the two motivating examples."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from lab.communication import communication_table, model_bytes
from lab.distribution import distribution_table
from lab.experiment import load_experiment
from lab.motivation import cosine_example, linear_example
from lab.paper import find_experiment
from lab.report import write_report


def test_the_byte_table_has_the_models_bytes_and_the_papers() -> None:
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
    for client, truth in enumerate((1.0, 2.0)):  # without an offset each client's best w is its own
        assert abs(example.weights[example.plain[client].argmin()] - truth) < 0.05


def test_an_offset_helps_a_linear_model_only_against_a_constant() -> None:
    def loss(with_offsets: bool, means: tuple[float, float]) -> float:
        return float(linear_example(with_offsets=with_offsets, noise_means=means).losses[-1])

    assert loss(True, (1.0, -1.0)) < 0.5 * loss(False, (1.0, -1.0))
    assert abs(loss(True, (0.0, 0.0)) - loss(False, (0.0, 0.0))) < 0.05


def test_the_splits_of_the_paper_s_figure_have_its_dh() -> None:
    lines = distribution_table(load_experiment(find_experiment(Path("fig-distribution")))).splitlines()[2:]
    cells = [[part.strip() for part in line.strip("|").split("|")] for line in lines]
    assert [cell[1:] for cell in cells] == [
        ["0%", "10", "10"],
        ["40%", "6", "6"],
        ["60%", "4", "4"],
        ["100%", "1", "1"],
    ]


@pytest.mark.parametrize("name", ["motivation", "fig-distribution"])
def test_a_report_without_federations_has_its_figure(name: str, tmp_path: Path) -> None:
    shutil.copyfile(find_experiment(Path(name)), tmp_path / "experiment.toml")
    assert f"{name}.svg" in write_report(tmp_path, tmp_path).read_text()
    assert (tmp_path / f"{name}.svg").exists()
