"""Reports of experiments: tables and figures."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.experiments import TEXT, run

from lab.experiments.experiment import load_experiment
from lab.experiments.intervals import spread
from lab.experiments.report import write_report
from lab.experiments.results import Results
from lab.experiments.tables import first_round, rounds_table
from shared.contract.errors import DistransError


class TestAReport:
    def test_shows_measured_numbers_next_to_the_papers(self, finished: tuple[Path, int, str], tmp_path: Path) -> None:
        folder = finished[0]
        text = write_report(folder, tmp_path).read_text()
        values = [r["last"]["accuracy"] for r in Results(folder).load() if r["cell"]["label"] == "FedAvg"]
        assert f"{spread(values)} · paper 0.726" in text
        assert "### digits (paper: cifar10)\n\n| method | DH 100% |\n" in text
        for name, control in (("masked", ", masked"), ("reweighted", " + prior")):
            values = [r["last"][f"{name}_accuracy"] for r in Results(folder).load() if r["cell"]["label"] == "FedAvg"]
            assert f"| FedAvg{control} | {spread(values)} |" in text
        assert "DisTrans, masked" not in text
        assert "Scale **full**: 4 of 4 federations finished." in text
        assert "16 training images per class, 6 test images per class, in place of cifar10" in text
        assert "| > 0 | > 1 |" in text
        assert "| digits | 10 | 100% | FedAvg | 1 | – |" in text
        assert (folder / "try.svg").read_text().startswith("<?xml")
        assert (folder / "try.png").stat().st_size > 1000

    def test_names_missing_cells_with_their_reasons_and_counts_omitted_results(
        self, finished: tuple[Path, int, str], tmp_path: Path
    ) -> None:
        folder = tmp_path / "out"
        shutil.copytree(finished[0], folder)
        stored, cells = Results(folder), load_experiment(folder / "experiment.toml").cells("full")
        gone = [cell for cell in cells if cell.label == "FedAvg"]
        for cell in gone:
            (folder / "cells" / f"{cell.id}.json").unlink()
        stored.store_failure(gone[0], "Training diverged.", "details")
        text = write_report(folder, tmp_path).read_text()
        assert "2 of 4 federations finished" in text
        assert f"- Training diverged. (1: {gone[0].title})\n- not run yet (1: {gone[1].title})\n" in text
        assert "| FedAvg | – · paper 0.726 |" in text
        assert "omitted" not in text
        file = folder / "experiment.toml"
        file.write_text(file.read_text().replace("seeds = [0, 1]", "seeds = [0]"))
        assert "Results omitted because their settings differ: 1." in write_report(folder, tmp_path).read_text()

    def test_report_is_written_without_its_figure(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "umap", SimpleNamespace(UMAP=None))  # not reached
        file = tmp_path / "try.toml"
        file.write_text(TEXT.replace("FIGURE", "umap"))
        run(file, tmp_path / "out", only=("seed=0", "method=FedAvg"))
        shutil.rmtree(tmp_path / "out" / "checkpoints")
        assert "No figure: The trained model of" in write_report(tmp_path / "out", tmp_path).read_text()

    def test_median_counts_seeds_that_never_reach_an_accuracy(self, finished: tuple[Path, int, str]) -> None:
        experiment = load_experiment(finished[0] / "experiment.toml").model_copy(update={"reach": (0.5,)})
        result = next(r for r in Results(finished[0]).load() if r["cell"]["label"] == "FedAvg")
        curves = [[{"round": n, "accuracy": 0.6 if n >= first else 0.1} for n in range(1, 21)] for first in (5, 10, 99)]
        text = rounds_table(experiment, [result | {"curve": curve} for curve in curves])
        assert "| digits | 10 | 100% | FedAvg | 10 " in text

    def test_missing_results_say_to_run_the_experiment_first(self, tmp_path: Path) -> None:
        with pytest.raises(DistransError, match="Run the experiment first"):
            write_report(tmp_path, tmp_path)

    def test_varied_setting_is_plotted(self, tmp_path: Path) -> None:
        file = tmp_path / "try.toml"
        file.write_text(TEXT.replace("FIGURE", "lines") + '[vary]\nkey = "training.epochs"\nvalues = [1, 2]\n')
        run(file, tmp_path / "out", only=("method=FedAvg", "seed=0"))
        text = write_report(tmp_path / "out", tmp_path).read_text()
        assert "| method | training.epochs = 1 | training.epochs = 2 |" in text
        assert "training.epochs" in (tmp_path / "out" / "try.svg").read_text()

    def test_features_come_from_the_trained_models(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from lab.experiments.cells import Cell, Workspace
        from lab.experiments.plots import trained_features

        file = tmp_path / "try.toml"
        file.write_text(TEXT.replace("FIGURE", "umap"))
        run(file, tmp_path / "out", only=("seed=0",))
        for result in Results(tmp_path / "out").load():
            cell = Cell.model_validate(result["cell"])
            features, labels, classes = trained_features(cell, Workspace(tmp_path, tmp_path / "out" / "checkpoints"))
            assert classes == tuple("0123456789")
            assert features.shape == (60, 200 if cell.label == "DisTrans" else 100)
            assert sorted(labels.tolist()) == sorted(list(range(10)) * 6)
            assert features.std() > 0
        with monkeypatch.context() as without:
            without.setitem(sys.modules, "umap", None)  # as if it were not installed
            assert "distrans[figures]" in write_report(tmp_path / "out", tmp_path).read_text()

    def test_feature_plot_has_methods_in_order_and_names_classes_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class FirstTwo:
            """Stand-in that uses the first two features; the real UMAP is slow to load."""

            def __init__(self, **_: object) -> None: ...

            def fit_transform(self, features: Any) -> Any:
                return features[:, :2]

        monkeypatch.setitem(sys.modules, "umap", SimpleNamespace(UMAP=FirstTwo))
        file = tmp_path / "try.toml"
        file.write_text(TEXT.replace("FIGURE", "umap").replace('label = "DisTrans"', 'label = "Z"'))
        run(file, tmp_path / "out", only=("seed=0",))
        figure = write_report(tmp_path / "out", tmp_path).with_name("try.svg").read_text()
        assert 0 < figure.index("<!-- Z: digits, DH 100% -->") < figure.index("<!-- FedAvg: digits, DH 100% -->")
        assert [figure.count(f"<!-- {name} -->") for name in range(10)] == [1] * 10


def test_spread_shows_mean_and_deviation_and_first_round_skips_gaps() -> None:
    assert spread([]) == "–"
    assert spread([0.5]) == "0.500"
    assert spread([0.4, 0.6]) == "0.500 ± 0.141 (2)"
    curve = [{"round": 2, "accuracy": 0.5}, {"round": 4, "accuracy": None}, {"round": 6, "accuracy": 0.8}]
    assert (first_round(curve, 0.5), first_round(curve, 0.4), first_round(curve, 0.9)) == (6, 2, None)
