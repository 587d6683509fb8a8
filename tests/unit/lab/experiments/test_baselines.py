"""Baselines in experiments: clients alone, fine-tuned models, what agents serve; which cells stay finished."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.experiments import BASELINES, measured, run

from lab.experiments import cells as cells_module
from lab.experiments.cells import Cell, Workspace, run_cell
from lab.experiments.experiment import Experiment, ExperimentError, load_experiment
from lab.experiments.report import write_report
from lab.experiments.results import Results


def experiment(methods: list[dict[str, Any]], **changes: Any) -> Experiment:
    data = [{"name": "digits", "clients": [10], "dh": [0.8]}]
    given = {"name": "try", "title": "A try", "rounds": 3, "seeds": [0], "data": data, "methods": methods}
    return Experiment.model_validate(given | changes)


def of(folder: Path, label: str, shift: str = "none") -> dict[str, Any]:
    found = [r for r in Results(folder).load() if (r["cell"]["label"], r["cell"]["data"]["shift"]) == (label, shift)]
    (result,) = found
    return result


class TestEntries:
    def test_list_of_shifts_gives_one_data_set_each(self) -> None:
        data = [{"name": "digits", "shift": ["none", "inverted"], "clients": [10], "dh": [0.8], "rounds": 7}]
        cells = experiment([{"label": "Alone", "alone": True}], data=data).cells("full")
        assert [(cell.data.shift, cell.rounds) for cell in cells] == [("none", 7), ("inverted", 7)]
        with pytest.raises(ValueError, match="shift"):
            experiment([{"label": "Alone", "alone": True}], data=[{**data[0], "shift": []}])

    def test_method_with_no_values_of_the_varied_setting_runs_once_without_it(self) -> None:
        methods = [
            {"label": "DisTrans", "method": {"name": "distrans"}},
            {"label": "FedAvg", "method": {"name": "fedavg"}, "vary": []},
            {"label": "Alone", "alone": True, "vary": []},
        ]
        cells = experiment(methods, vary={"key": "method.alpha", "values": [0.3, 0.5]}).cells("full")
        assert [(cell.label, cell.varied) for cell in cells] == [
            ("DisTrans", 0.3),
            ("DisTrans", 0.5),
            ("FedAvg", None),
            ("Alone", None),
        ]

    @pytest.mark.parametrize(
        ("changed", "to", "words"),
        [
            ("alone = true", 'alone = true\nmethod = { name = "fedavg" }', "'Alone' trains every client alone"),
            ("fine_tuned = true", "served = true", "'FedAvg' has no offset; served is for distrans"),
        ],
    )
    def test_contradictions_are_errors(self, changed: str, to: str, words: str, tmp_path: Path) -> None:
        file = tmp_path / "try.toml"
        file.write_text(BASELINES.replace(changed, to))
        with pytest.raises(ExperimentError, match=words):
            load_experiment(file)


class TestIds:
    def test_do_not_depend_on_what_is_evaluated_at_the_end(self) -> None:
        plain, tuned = (
            experiment([{"label": "FedAvg", "method": {"name": "fedavg"}, "fine_tuned": wanted}]).cells("full")[0]
            for wanted in (False, True)
        )
        assert plain != tuned
        assert plain.id == tuned.id

    def test_tell_clients_alone_from_a_federation(self) -> None:
        (alone,) = experiment([{"label": "one", "alone": True}]).cells("full")
        (federated,) = experiment([{"label": "one", "method": {"name": "fedavg"}}]).cells("full")
        assert alone.plan == federated.plan
        assert alone.id != federated.id

    def test_of_a_published_cell_is_unchanged(self) -> None:
        (cell,) = experiment([{"label": "FedAvg", "method": {"name": "fedavg"}}]).cells("full")
        earlier = {k: v for k, v in cell.model_dump(mode="json").items() if k not in ("alone", "final")}
        assert Cell.model_validate(earlier).id == cell.id


class TestARun:
    def test_alone_is_the_same_in_its_own_cell_and_in_one_that_serves(self, baselines: Path) -> None:
        for shift in ("none", "rotated"):
            alone, other = of(baselines, "Alone", shift), of(baselines, "DisTrans", shift)["final"]["alone"]
            assert alone["last"]["accuracy"] == other["correct"] / other["samples"]
            assert alone["bytes_per_round"] == {"down_shared": 0, "down_personal": 0, "up": 0, "participants": 5}

    def test_counts_what_each_entry_asks_for(self, baselines: Path) -> None:
        assert of(baselines, "Alone")["final"].keys() == {"foreign"}
        assert of(baselines, "FedAvg")["final"].keys() == {"fine_tuned", "foreign"}
        served = of(baselines, "DisTrans")
        assert served["final"].keys() >= {"served", "global+prior", "adapted", "foreign_without_offset"}
        assert len(served["choices"]) == 5
        assert "final_fine_tuned" in (baselines / "results.csv").read_text()

    def test_report_has_their_rows(self, baselines: Path, tmp_path: Path) -> None:
        table = write_report(baselines, tmp_path).read_text().split("## What is served")[0]
        for row in ("Alone", "FedAvg + prior", "FedAvg, fine-tuned", "DisTrans, without offset", "DisTrans, served"):
            assert table.count(f"| {row} | 0.") == 2  # images alike, rotated
        assert "masked" not in table

    def test_is_finished_only_with_its_final_evaluation(self, baselines: Path, tmp_path: Path) -> None:
        file = tmp_path / "try.toml"
        file.write_text(BASELINES.replace("fine_tuned = true", "").replace("foreign_classes = true", ""))
        only = ("method=FedAvg", "shift=none")
        run(file, tmp_path / "out", only=only)
        (before,) = measured(tmp_path / "out").values()
        assert before["final"] == {}
        assert "1 already finished" in run(file, tmp_path / "out", only=only)[1]
        file.write_text(BASELINES)
        assert "0 already finished" in run(file, tmp_path / "out", only=only)[1]
        assert measured(tmp_path / "out")[before["id"]] == measured(baselines)[before["id"]]
        assert before["curve"] == of(baselines, "FedAvg")["curve"]

    def test_model_that_agents_would_serve_is_kept_for_figures(self, baselines: Path) -> None:
        kept = {file.parent.name for file in (baselines / "checkpoints").glob("*/checkpoint.json")}
        assert kept == {of(baselines, "DisTrans", shift)["id"] for shift in ("none", "rotated")}
        assert not list((baselines / "checkpoints").glob("*/alone"))


def test_interruption_while_training_alone_costs_only_its_last_rounds(
    baselines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell.model_validate(of(baselines, "DisTrans")["cell"])
    workspace = Workspace(tmp_path, tmp_path / "checkpoints")
    trained: list[int] = []
    run_round = cells_module.AloneSimulation.run_round

    def interrupted(self: Any) -> Any:
        if self.round == 2 and 2 not in trained:
            trained.append(2)
            raise KeyboardInterrupt
        trained.append(self.round)
        return run_round(self)

    monkeypatch.setattr(cells_module, "_SECONDS_BETWEEN_CHECKPOINTS", -1)
    monkeypatch.setattr(cells_module.AloneSimulation, "run_round", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_cell(cell, workspace)
    result = json.loads(json.dumps(run_cell(cell, workspace)))
    assert trained == [0, 1, 2, 2]
    assert {k: v for k, v in result.items() if k != "seconds"} == measured(baselines)[cell.id]
