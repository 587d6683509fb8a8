"""Running experiments: results, resuming, failures, engines, reports. Real federations on a few digits."""

import csv
import errno
import importlib.util
import io
import json
import os
import shutil
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from lab import cells as cells_module
from lab.__main__ import app, main
from lab.experiment import ExperimentError, load_experiment
from lab.report import first_round, rounds_table, spread, write_report
from lab.results import Results
from lab.runs import Board, Clock, RunOptions, run_experiment, select
from shared.command_line import run as run_program
from shared.problems import DistransError

ROOT = Path(__file__).resolve().parents[3]
TEXT = """
name = "try"
title = "A try"
paper = "table1"
rounds = 3
seeds = [0, 1]
reach = [0.0, 1.0]
figure = "FIGURE"
[plan]
model = { activation = "relu" }
training = { lr = 0.1 }
[[data]]
name = "digits"
stands_for = "cifar10"
train_per_class = 16
test_per_class = 6
clients = [10]
dh = [1.0]
[[methods]]
label = "DisTrans"
method = { name = "distrans" }
[[methods]]
label = "FedAvg"
method = { name = "fedavg" }
controls = true
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "try.toml"
    path.write_text(TEXT.replace("FIGURE", "curves"))
    return path


def run(file: Path, out: Path, **options: Any) -> tuple[int, str]:
    """The number of failures and what was printed."""
    printed = io.StringIO()
    console = Console(file=printed, force_terminal=False)
    chosen = RunOptions(out=out, data_root=file.parent / "data", **options)
    return run_experiment(console, file, load_experiment(file), chosen), printed.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """The folder of a whole run, its failures and what it printed; tests only look at it."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "try.toml").write_text(TEXT.replace("FIGURE", "curves"))
    return folder / "out", *run(folder / "try.toml", folder / "out")


def measured(folder: Path) -> dict[str, Any]:
    """All results by id, without how long they took."""
    return {r["id"]: {key: value for key, value in r.items() if key != "seconds"} for r in Results(folder).load()}


class TestARun:
    def test_keeps_a_file_a_cell_and_two_tables(self, finished: tuple[Path, int, str]) -> None:
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
            assert last["masked_accuracy"] == 0.5  # the one own class, always: right for positives, wrong for the rest
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

    def test_does_only_what_is_missing(self, file: Path, tmp_path: Path) -> None:
        run(file, tmp_path / "out", only=("seed=0", "method=FedAvg"))
        first = measured(tmp_path / "out")
        _, printed = run(file, tmp_path / "out")
        assert "4 federations at scale full, 1 of them done before" in printed
        assert "[3 of 3]" in printed
        assert measured(tmp_path / "out").items() >= first.items()

    def test_goes_on_after_ctrl_c_with_the_same_result(
        self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run(file, tmp_path / "straight", only=("seed=0",))
        count, on_round = 0, Board.on_round

        def interrupted(self: Board, cell: Any, done: int) -> None:
            nonlocal count
            count += 1
            if count == 8:  # the second cell, after its third round of work but before anybody was told
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

    def test_a_broken_checkpoint_costs_its_rounds_and_nothing_else(self, file: Path, tmp_path: Path) -> None:
        run(file, tmp_path / "straight", only=("seed=0", "method=FedAvg"))
        (cell_id,) = measured(tmp_path / "straight")
        broken = tmp_path / "out" / "checkpoints" / cell_id
        broken.mkdir(parents=True)
        (broken / "checkpoint.json").write_text("{")
        run(file, tmp_path / "out", only=("seed=0", "method=FedAvg"))
        assert measured(tmp_path / "out") == measured(tmp_path / "straight")

    def test_a_cell_that_fails_is_said_and_the_others_go_on(self, tmp_path: Path) -> None:
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

    def test_a_missing_data_set_is_said_once_and_the_other_sets_are_run(self, tmp_path: Path) -> None:
        file = tmp_path / "try.toml"
        absent = '\n[[data]]\nname = "orl-faces"\nclients = [40]\ndh = [1.0]\n'
        file.write_text(TEXT.replace("FIGURE", "none") + absent)
        failures, printed = run(file, tmp_path / "out", only=("seed=0",))
        assert failures == 2
        reason = f"The data set orl-faces is not in {tmp_path / 'data' / 'orl-faces'}"
        assert printed.count(reason) == 1
        assert "failed: 2 federations on orl-faces" in printed
        assert all(reason in text.read_text() for text in (tmp_path / "out" / "failed").iterdir())
        assert len(list((tmp_path / "out" / "cells").iterdir())) == 2

    def test_two_runs_do_not_write_to_one_folder(self, file: Path, tmp_path: Path) -> None:
        with Results(tmp_path / "out").locked(), pytest.raises(DistransError, match="Another run"):
            run(file, tmp_path / "out")

    def test_says_which_files_hold_no_result_and_runs_their_cells(
        self, finished: tuple[Path, int, str], file: Path, tmp_path: Path
    ) -> None:
        shutil.copytree(finished[0] / "cells", tmp_path / "out" / "cells")
        broken = min((tmp_path / "out" / "cells").iterdir())
        broken.write_text("{}")
        failures, printed = run(file, tmp_path / "out")
        assert failures == 0
        assert f"{broken} holds no result; its federation counts as not done.\n" in printed
        assert "3 of them done before" in printed
        assert measured(tmp_path / "out") == measured(finished[0])

    def test_has_tables_of_the_present_form_of_the_file_and_of_all_its_cells(
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

    def test_of_the_file_that_a_folder_of_results_keeps(self, finished: tuple[Path, int, str], tmp_path: Path) -> None:
        folder = tmp_path / "out"
        shutil.copytree(finished[0], folder)
        assert "4 of them done before" in run(folder / "experiment.toml", folder)[1]

    def test_a_wrong_device_is_said_before_anything_is_run(self, file: Path, tmp_path: Path) -> None:
        with pytest.raises(DistransError, match="device 'gpu' cannot be used here"):
            run(file, tmp_path / "out", device="gpu")
        assert not (tmp_path / "out").exists()

    def test_a_cluster_may_have_a_device_that_is_not_here(
        self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RAY_ADDRESS", "nowhere:1")
        monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
        with pytest.raises(DistransError, match="Ray is not installed"):
            run(file, tmp_path / "out", engine="ray", device="gpu")

    def test_an_unknown_engine_is_an_error(self, file: Path, tmp_path: Path) -> None:
        with pytest.raises(DistransError, match="no engine 'gpu'"):
            run(file, tmp_path / "out", engine="gpu")


def engines() -> list[Any]:
    declared = any(name.startswith("ray") for name in _extra("test"))
    missing = importlib.util.find_spec("ray") is None
    must = declared and os.environ.get("CI") == "true"
    return ["processes", pytest.param("ray", marks=pytest.mark.skipif(missing and not must, reason="no Ray here"))]


def _extra(name: str) -> list[str]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][name]


@pytest.fixture(scope="module")
def with_failure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment of three cells, one of which diverges, run in this process: try.toml and one/."""
    folder = tmp_path_factory.mktemp("engines")
    bad = '[[methods]]\nlabel = "bad"\nmethod = { name = "fedavg" }\nplan.training.lr = 90'
    text = TEXT.replace("FIGURE", "none").replace("seeds = [0, 1]", "seeds = [0]") + bad
    (folder / "try.toml").write_text(text)
    assert run(folder / "try.toml", folder / "one")[0] == 1
    return folder


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")  # Ray's
@pytest.mark.parametrize("engine", engines())
def test_every_engine_has_the_same_results_and_reports_failures(
    engine: str, with_failure: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    failures, printed = run(with_failure / "try.toml", tmp_path / "many", engine=engine, workers=2)
    assert failures == 1
    assert "diverged" in printed
    assert measured(tmp_path / "many") == measured(with_failure / "one") != {}


def test_workers_do_not_import_what_lies_in_the_current_folder(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    Path("server.py").write_text("print('Hello')\n")
    failures, printed = run(file, tmp_path / "out", engine="processes", workers=1, only=("seed=0", "method=FedAvg"))
    assert failures == 0, printed


@pytest.mark.parametrize(
    ("only", "words"),
    [
        (("method=FedAvg", "method=FedAvgg"), "has method=FedAvgg. There is method=DisTrans, FedAvg."),
        (("dh=100%", "dh=.7"), "has dh=.7. There is dh=1.0."),
        (("seed=0", "vary=3"), "has vary=3. There is vary=None."),
    ],
)
def test_a_filter_that_meets_no_cell_is_refused_beside_one_that_does(
    only: tuple[str, str], words: str, file: Path
) -> None:
    with pytest.raises(ExperimentError) as raised:
        select(load_experiment(file).cells("full"), only)
    assert str(raised.value) == f"No federation of this experiment {words}"


class TestTheCommandLine:
    def test_says_in_a_line_what_the_system_refuses(
        self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "afile").touch()
        monkeypatch.setattr(sys, "argv", ["distrans-lab", "run", str(file), "--out", str(tmp_path / "afile")])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 1
        words = f"error: {tmp_path}/afile/cells: Not a directory. Check the path, or name another.\n"
        assert capsys.readouterr().err == words

    @pytest.mark.parametrize(
        ("number", "words"),
        [
            (errno.ENOSPC, "a: No space left on device. Make room on the disk, then run it again."),
            (errno.EROFS, "a: Read-only file system. Name another place, or change its permissions."),
            (errno.ENOLCK, "a: No locks available. Fix that, then run it again."),
        ],
    )
    def test_says_what_to_do_about_it(self, number: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.outcome_of(OSError(number, os.strerror(number), "a")) == 1
        assert capsys.readouterr().err == f"error: {words}\n"

    def test_does_not_hide_what_a_program_does_wrong(self) -> None:
        for error in (OSError(errno.EBADF, "Bad file descriptor"), KeyError("round")):
            with pytest.raises(type(error)):
                self.outcome_of(error)

    @staticmethod
    def outcome_of(error: Exception) -> object:
        """The exit code of a program in which this error is raised."""
        program = typer.Typer(pretty_exceptions_enable=False)

        @program.command()
        def fail() -> None:
            raise error

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["program"])
            with pytest.raises(SystemExit) as ended:
                run_program(program)
        return ended.value.code

    def test_runs_and_reports_by_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert CliRunner().invoke(app, ["run", "table7", "--scale", "small"]).exit_code == 0
        shown = CliRunner().invoke(app, ["report", "paper/table7.toml"])  # of the scale that is there
        assert shown.exit_code == 0
        assert "| resnet18 | 44,765,128 | 44,785,608 |" in shown.output

    def test_ends_with_an_error_code_when_a_federation_has_failed(self, tmp_path: Path) -> None:
        file = tmp_path / "try.toml"
        file.write_text(TEXT.replace("FIGURE", "none").replace("lr = 0.1", "lr = 90"))
        arguments = ["run", str(file), "--out", str(tmp_path / "out"), "--only", "method=FedAvg", "--only", "seed=0"]
        answer = CliRunner().invoke(app, [*arguments, "--device", "cpu"])
        assert answer.exit_code == 1
        assert "diverged" in answer.output
        assert answer.exception is None or isinstance(answer.exception, SystemExit)


class TestAReport:
    def test_sets_measured_numbers_beside_the_papers(self, finished: tuple[Path, int, str], tmp_path: Path) -> None:
        folder = finished[0]
        text = write_report(folder, tmp_path).read_text()
        values = [r["last"]["accuracy"] for r in Results(folder).load() if r["cell"]["label"] == "FedAvg"]
        assert f"{spread(values)} · paper 0.726" in text
        assert "### digits (paper: cifar10)\n\n| method | DH 100% |\n" in text
        for name, control in (("masked", "masked"), ("reweighted", "re-weighted")):
            values = [r["last"][f"{name}_accuracy"] for r in Results(folder).load() if r["cell"]["label"] == "FedAvg"]
            assert f"| FedAvg, {control} | {spread(values)} |" in text
        assert "DisTrans, masked" not in text
        assert "Scale **full**: 4 of 4 federations done" in text
        assert "16 training images a class, 6 test images a class, in the place of cifar10" in text
        assert "| > 0 | > 1 |" in text
        assert "| digits | 10 | 100% | FedAvg | 1 | – |" in text
        assert (folder / "try.svg").read_text().startswith("<?xml")
        assert (folder / "try.png").stat().st_size > 1000

    def test_names_what_is_not_there_and_why_and_what_is_left_out(
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
        assert "2 of 4 federations done" in text
        assert f"- Training diverged. (1: {gone[0].title})\n- not run yet (1: {gone[1].title})\n" in text
        assert "| FedAvg | – · paper 0.726 |" in text
        assert "left out" not in text
        file = folder / "experiment.toml"
        file.write_text(file.read_text().replace("seeds = [0, 1]", "seeds = [0]"))
        assert "Of other forms of this experiment 1 more" in write_report(folder, tmp_path).read_text()

    def test_without_its_figure_is_a_report_all_the_same(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "umap", SimpleNamespace(UMAP=None))  # it is not reached
        file = tmp_path / "try.toml"
        file.write_text(TEXT.replace("FIGURE", "umap"))
        run(file, tmp_path / "out", only=("seed=0", "method=FedAvg"))
        shutil.rmtree(tmp_path / "out" / "checkpoints")
        assert "There is no figure: The trained model of" in write_report(tmp_path / "out", tmp_path).read_text()

    def test_counts_seeds_that_never_reach_an_accuracy_in_its_median(self, finished: tuple[Path, int, str]) -> None:
        experiment = load_experiment(finished[0] / "experiment.toml").model_copy(update={"reach": (0.5,)})
        result = next(r for r in Results(finished[0]).load() if r["cell"]["label"] == "FedAvg")
        curves = [[{"round": n, "accuracy": 0.6 if n >= first else 0.1} for n in range(1, 21)] for first in (5, 10, 99)]
        text = rounds_table(experiment, [result | {"curve": curve} for curve in curves])
        assert "| digits | 10 | 100% | FedAvg | 10 " in text

    def test_of_nothing_says_what_to_do(self, tmp_path: Path) -> None:
        with pytest.raises(DistransError, match="Run the experiment first"):
            write_report(tmp_path, tmp_path)

    def test_draws_a_varied_setting(self, tmp_path: Path) -> None:
        file = tmp_path / "try.toml"
        file.write_text(TEXT.replace("FIGURE", "lines") + '[vary]\nkey = "training.epochs"\nvalues = [1, 2]\n')
        run(file, tmp_path / "out", only=("method=FedAvg", "seed=0"))
        text = write_report(tmp_path / "out", tmp_path).read_text()
        assert "| method | training.epochs = 1 | training.epochs = 2 |" in text
        assert "training.epochs" in (tmp_path / "out" / "try.svg").read_text()

    def test_of_features_goes_back_to_the_trained_models(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from lab.cells import Cell, Workspace
        from lab.figures import trained_features

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

    def test_of_features_has_the_methods_in_order_and_names_the_classes_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class FirstTwo:
            """Places images by their first two features; the real one takes long to load."""

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


def test_tables_of_results_of_different_versions(finished: tuple[Path, int, str], tmp_path: Path) -> None:
    shutil.copytree(finished[0] / "cells", tmp_path / "cells")
    oldest = min((tmp_path / "cells").iterdir())
    result = json.loads(oldest.read_text())
    for row in (result["last"], *result["curve"]):
        del row["foreign_offset_accuracy"]
    oldest.write_text(json.dumps(result))
    Results(tmp_path).write_tables(load_experiment(finished[0] / "experiment.toml").cells("full"))
    assert all("foreign_offset_accuracy" in (tmp_path / f"{name}.csv").read_text() for name in ("results", "curves"))


def test_spread_and_first_round() -> None:
    assert spread([]) == "–"
    assert spread([0.5]) == "0.500"
    assert spread([0.4, 0.6]) == "0.500 ± 0.141 (2)"
    curve = [{"round": 2, "accuracy": 0.5}, {"round": 4, "accuracy": None}, {"round": 6, "accuracy": 0.8}]
    assert (first_round(curve, 0.5), first_round(curve, 0.4), first_round(curve, 0.9)) == (6, 2, None)


def test_time_left_counts_what_was_done_in_this_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("lab.runs.time.monotonic", lambda: now)
    clock = Clock(rounds=200)
    clock.count("a", 40)  # by an earlier run
    assert clock.left() == ""
    now = 100.0
    clock.count("a", 50)
    assert clock.left(", ") == ", about 25 min left"  # 150 rounds at 10 s
    clock.count("b", 0)
    clock.count("b", 140)
    assert clock.left() == "about 7 s left"
