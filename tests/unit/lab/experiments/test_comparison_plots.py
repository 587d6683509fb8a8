"""Figures that compare methods; the models behind them are trained for a few rounds."""

import shutil
from pathlib import Path

from lab.experiments.experiment import load_experiment
from lab.experiments.report import write_report


def drawn(folder: Path, kind: str) -> str:
    """Return the figure's SVG, in which every text is a comment."""
    assert (folder / f"try-{kind}.png").stat().st_size > 1000
    return (folder / f"try-{kind}.svg").read_text()


def test_report_has_all_figures_of_the_experiment(baselines: Path, tmp_path: Path) -> None:
    text = write_report(baselines, tmp_path).read_text()
    assert [f"![A try](try-{kind}.svg)" in text for kind in ("dots", "offsets", "foreign-offsets")] == [True] * 3


def test_dots_show_every_row_and_of_the_compared_method_what_is_served(baselines: Path, tmp_path: Path) -> None:
    write_report(baselines, tmp_path)
    figure = drawn(baselines, "dots")
    for name in ("Alone", "FedAvg + prior", "FedAvg, fine-tuned", "DisTrans, served"):
        assert figure.count(f"<!-- {name} -->") == 1  # in the legend
    assert "<!-- DisTrans + prior -->" not in figure
    assert figure.count("<!-- DH 60% -->") == 2


def test_foreign_offsets_are_shown_for_methods_with_offsets(baselines: Path, tmp_path: Path) -> None:
    write_report(baselines, tmp_path)
    figure = drawn(baselines, "foreign-offsets")
    assert "<!-- DisTrans, own offset -->" in figure
    assert "<!-- without offset -->" in figure
    assert "FedAvg" not in figure


def test_offsets_are_shown_by_client(baselines: Path, tmp_path: Path) -> None:
    write_report(baselines, tmp_path)
    figure = drawn(baselines, "offsets")
    assert figure.count("<image") == 2 * 5 + 1  # two settings, five clients, the color scale
    assert "270°" in figure


def test_figures_without_their_results_are_explained(baselines: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(baselines, folder)
    shutil.rmtree(folder / "checkpoints")
    assert "No figure: The trained model of" in write_report(folder, tmp_path).read_text()
    for cell in load_experiment(folder / "experiment.toml").cells("full"):
        if cell.label == "DisTrans":
            (folder / "cells" / f"{cell.id}.json").unlink()
    text = write_report(folder, tmp_path).read_text()
    assert "No figure: No served method has finished with the first seed." in text
    assert "No figure: No method of this experiment has offsets." in text
