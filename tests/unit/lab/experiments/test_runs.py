"""Running experiments: results, resuming and failures, with real federations on a few digits."""

import csv
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from support.experiments import TEXT, measured, run

from lab.experiments import cells as cells_module
from lab.experiments.experiment import ExperimentError, load_experiment
from lab.experiments.results import Results
from lab.experiments.runs import Board, TimeLeft, select
from shared.contract.errors import DistransError


class TestARun:
    def test_writes_one_file_per_cell_and_two_tables(self, finished: tuple[Path, int, str]) -> None:
        folder, failures, printed = finished
        assert failures == 0
        assert "[4 of 4] digits, 10 clients, DH 100%, FedAvg, seed 1: accuracy 0." in printed
        results = Results(folder).load()
        assert len(results) == 4
        for result in results:
            assert [row["round"] for row in result["curve"]] == [1, 2, 3]
            assert result["last"] == result["curve"][-1]
            assert result["best"]["accuracy"] == max(row["accuracy"] for row in result["curve"])
            assert (result["dh"], result["images"]) == (1.0, {"train": 160, "test": 120})
            last = result["last"]
            assert last["accuracy"] == pytest.approx((last["positive_accuracy"] + last["negative_accuracy"]) / 2)
            assert last["masked_accuracy"] == 0.5  # always the one own class: right for positives, wrong for the rest
            moves = result["cell"]["label"] == "DisTrans"
            assert (last["offset_motion"] is not None) == moves
            assert result["bytes_per_round"]["participants"] == 10
            assert (result["bytes_per_round"]["down_personal"] > 0) == moves
        with (folder / "results.csv").open() as handle:
            lines = list(csv.DictReader(handle))
        assert [(line["data"], line["label"], line["seed"]) for line in lines] == [
            ("digits", result["cell"]["label"], str(result["cell"]["seed"])) for result in results
        ]
        with (folder / "curves.csv").open() as handle:
            assert len(list(csv.DictReader(handle))) == 12
        assert not any((folder).glob("checkpoints/*"))

    def test_runs_only_unfinished_cells(self, file: Path, tmp_path: Path) -> None:
        run(file, tmp_path / "out", only=("seed=0", "method=FedAvg"))
        first = measured(tmp_path / "out")
        _, printed = run(file, tmp_path / "out")
        assert "4 federations at scale full, 1 already finished" in printed
        assert "[3 of 3]" in printed
        assert measured(tmp_path / "out").items() >= first.items()

    def test_resumes_after_ctrl_c_with_the_same_result(
        self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run(file, tmp_path / "straight", only=("seed=0",))
        count, on_round = 0, Board.on_round

        def interrupted(self: Board, cell: Any, done: int) -> None:
            nonlocal count
            count += 1
            if count == 8:  # in the second cell, after its third round but before it is reported
                raise KeyboardInterrupt
            on_round(self, cell, done)

        monkeypatch.setattr(cells_module, "_SECONDS_BETWEEN_CHECKPOINTS", -1)
        monkeypatch.setattr(Board, "on_round", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(file, tmp_path / "out", only=("seed=0",))
        assert len(measured(tmp_path / "out")) == 1
        (checkpoint,) = (tmp_path / "out" / "checkpoints").glob("*/checkpoint.json")
        assert json.loads(checkpoint.read_text())["round"] == 2
        starts: list[int] = []
        monkeypatch.setattr(Board, "on_round", lambda _self, _cell, done: starts.append(done))
        run(file, tmp_path / "out", only=("seed=0",))
        assert starts == [2, 3]
        assert measured(tmp_path / "out") == measured(tmp_path / "straight")

    def test_broken_checkpoint_costs_only_its_rounds(self, file: Path, tmp_path: Path) -> None:
        run(file, tmp_path / "straight", only=("seed=0", "method=FedAvg"))
        (cell_id,) = measured(tmp_path / "straight")
        broken = tmp_path / "out" / "checkpoints" / cell_id
        broken.mkdir(parents=True)
        (broken / "checkpoint.json").write_text("{")
        run(file, tmp_path / "out", only=("seed=0", "method=FedAvg"))
        assert measured(tmp_path / "out") == measured(tmp_path / "straight")

    def test_failing_cell_is_reported_and_the_others_run(self, tmp_path: Path) -> None:
        file = tmp_path / "try.toml"
        failing = TEXT.replace("FIGURE", "none").replace(
            '{ name = "fedavg" }', '{ name = "fedavg" }\nplan.training.lr = 90'
        )
        file.write_text(failing.replace("seeds = [0, 1]", "seeds = [0]"))
        failures, printed = run(file, tmp_path / "out")
        assert failures == 1
        assert "failed: digits, 10 clients, DH 100%, FedAvg, seed 0: " in printed
        assert "diverged" in printed
        assert [r["cell"]["label"] for r in Results(tmp_path / "out").load()] == ["DisTrans"]
        (reason,) = (tmp_path / "out" / "failed").iterdir()
        assert "diverged" in reason.read_text()

    def test_missing_data_set_is_reported_once_and_the_others_run(self, tmp_path: Path) -> None:
        file = tmp_path / "try.toml"
        absent = '\n[[data]]\nname = "orl-faces"\nclients = [40]\ndh = [1.0]\n'
        file.write_text(TEXT.replace("FIGURE", "none") + absent)
        failures, printed = run(file, tmp_path / "out", only=("seed=0",))
        assert failures == 2
        reason = f"Data set orl-faces not found in {tmp_path / 'data' / 'orl-faces'}"
        assert printed.count(reason) == 1
        assert "failed: 2 federations on orl-faces" in printed
        assert all(reason in text.read_text() for text in (tmp_path / "out" / "failed").iterdir())
        assert len(list((tmp_path / "out" / "cells").iterdir())) == 2

    def test_two_runs_do_not_write_to_one_folder(self, file: Path, tmp_path: Path) -> None:
        with Results(tmp_path / "out").locked(), pytest.raises(DistransError, match="Another run"):
            run(file, tmp_path / "out")

    def test_names_files_that_are_not_results_and_runs_their_cells(
        self, finished: tuple[Path, int, str], file: Path, tmp_path: Path
    ) -> None:
        shutil.copytree(finished[0] / "cells", tmp_path / "out" / "cells")
        broken = min((tmp_path / "out" / "cells").iterdir())
        broken.write_text("{}")
        failures, printed = run(file, tmp_path / "out")
        assert failures == 0
        assert f"{broken} is not a result; its federation will run again.\n" in printed
        assert "3 already finished" in printed
        assert measured(tmp_path / "out") == measured(finished[0])

    def test_tables_have_the_present_settings_and_all_cells(
        self, finished: tuple[Path, int, str], file: Path, tmp_path: Path
    ) -> None:
        shutil.copytree(finished[0] / "cells", tmp_path / "out" / "cells")
        file.write_text(file.read_text().replace("lr = 0.1", "lr = 0.2"))
        for seed in (0, 1):
            run(file, tmp_path / "out", only=(f"seed={seed}", "method=FedAvg"))
        with (tmp_path / "out" / "results.csv").open() as handle:
            assert [(line["label"], line["seed"]) for line in csv.DictReader(handle)] == [
                ("FedAvg", "0"),
                ("FedAvg", "1"),
            ]
        assert len(Results(tmp_path / "out").load()) == 6

    def test_accepts_the_experiment_file_of_a_results_folder(
        self, finished: tuple[Path, int, str], tmp_path: Path
    ) -> None:
        folder = tmp_path / "out"
        shutil.copytree(finished[0], folder)
        assert "4 already finished" in run(folder / "experiment.toml", folder)[1]

    def test_unavailable_device_is_reported_before_anything_runs(self, file: Path, tmp_path: Path) -> None:
        with pytest.raises(DistransError, match="Device 'gpu' is not available"):
            run(file, tmp_path / "out", device="gpu")
        assert not (tmp_path / "out").exists()

    def test_cluster_may_have_devices_that_this_machine_lacks(
        self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RAY_ADDRESS", "nowhere:1")
        monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
        with pytest.raises(DistransError, match="Ray is not installed"):
            run(file, tmp_path / "out", engine="ray", device="gpu")


@pytest.mark.parametrize(
    ("only", "words"),
    [
        (("method=FedAvg", "method=FedAvgg"), "has method=FedAvgg. Use method= with DisTrans, FedAvg."),
        (("dh=100%", "dh=.7"), "has dh=.7. Use dh= with 1.0."),
        (("seed=0", "vary=3"), "has vary=3. Use vary= with None."),
    ],
)
def test_filter_without_matches_is_refused_even_next_to_one_that_matches(
    only: tuple[str, str], words: str, file: Path
) -> None:
    with pytest.raises(ExperimentError) as raised:
        select(load_experiment(file).cells("full"), only)
    assert str(raised.value) == f"No federation of this experiment {words}"


def test_time_left_is_estimated_from_this_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("lab.experiments.runs.time.monotonic", lambda: now)
    clock = TimeLeft(rounds=200)
    clock.count("a", 40)  # in an earlier run
    assert clock.left() == ""
    now = 100.0
    clock.count("a", 50)
    assert clock.left(", ") == ", about 25 min left"  # 150 rounds at 10 s
    clock.count("b", 0)
    clock.count("b", 140)
    assert clock.left() == "about 7 s left"
