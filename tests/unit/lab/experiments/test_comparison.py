"""Tables that compare what is served with the other methods, from results written by hand."""

from typing import Any

import pytest

from lab.experiments.comparison import comparison_table
from lab.experiments.experiment import Experiment
from lab.experiments.final_tables import convergence_table, foreign_table, served_table
from lab.experiments.tables import accuracy_table

METHODS = [
    {"label": "Alone", "alone": True},
    {"label": "FedAvg", "method": {"name": "fedavg"}, "prior": True, "fine_tuned": True},
    {"label": "New", "preset": "learned-offset", "method": {"name": "distrans"}, "served": True},
]
DATA = [{"name": "digits", "shift": ["none", "rotated"], "clients": [10], "dh": [0.0, 0.6]}]


@pytest.fixture
def experiment() -> Experiment:
    given = {"name": "try", "title": "A try", "rounds": 10, "seeds": [0, 1], "evaluate_every": 4}
    return Experiment.model_validate(
        given | {"data": DATA, "methods": METHODS, "compare": "New", "foreign_classes": True}
    )


def counted(share: float, samples: int = 100) -> dict[str, int]:
    return {"samples": samples, "correct": round(share * samples)}


def results(experiment: Experiment, **accuracies: list[float]) -> list[dict[str, Any]]:
    """Return a result per cell; accuracies are by method, one per seed."""
    found = []
    for cell in experiment.cells("full"):
        accuracy = accuracies[cell.label][cell.seed]
        curve = [
            {"round": number, "accuracy": accuracy - lack, "reweighted_accuracy": accuracy - lack + 0.01}
            for number, lack in ((4, 0.3), (8, 0.02), (10, 0.0))
        ]
        final = {"fine_tuned": counted(0.5), "foreign": counted(0.7 if cell.dh else 0, 300 if cell.dh else 0)}
        if cell.label == "New":
            final |= {name: counted(0.6) for name in ("global", "global+prior", "offset+prior", "adapted")}
            final |= {"adapted+prior": counted(0.6), "alone": counted(0.6), "served": counted(accuracy + 0.1)}
            final["foreign_without_offset"] = counted(0.8 if cell.dh else 0, 300 if cell.dh else 0)
        choices = {
            "a": {"candidate": "blend", "weights": {"global+prior": 0.25, "alone": 0.75}},
            "b": {"candidate": "alone", "weights": {"alone": 1.0}},
        }
        result = {"id": cell.id, "cell": cell.model_dump(mode="json"), "images": {"test": 100}, "curve": curve}
        result |= {"last": curve[-1], "best": curve[-1], "final": final}
        found.append(result | {"choices": choices if cell.label == "New" else {}})
    return found


def line(table: str, start: str) -> list[str]:
    (found,) = [row for row in table.splitlines() if row.startswith(f"| {start} |")]
    return [cell.strip() for cell in found.strip("|").split("|")]


class TestComparison:
    def test_subtracts_the_best_other_row_seed_by_seed(self, experiment: Experiment) -> None:
        found = results(experiment, Alone=[0.6, 0.8], FedAvg=[0.7, 0.6], New=[0.6, 0.7])
        table = comparison_table(experiment, found)
        # served: 0.70 and 0.80, alone 0.60 and 0.80
        cells = line(table, "digits, DH 60%")
        assert cells[1:6] == ["100", "0.700", "0.650", "0.660", "0.500"]
        assert cells[6:11] == ["0.650", "0.660", "0.600", "0.600", "**0.750**"]
        assert cells[11:] == ["+5.0 ± 7.1", "+5.0 ± 7.1 (Alone)"]

    def test_has_means_of_settings(self, experiment: Experiment) -> None:
        found = results(experiment, Alone=[0.6, 0.8], FedAvg=[0.7, 0.6], New=[0.4, 0.4])
        for result in found:  # in one setting, what is served is much better
            if result["cell"]["data"]["shift"] == "rotated" and result["cell"]["dh"] and result["final"].get("served"):
                result["final"]["served"] = counted(0.9)
        table = comparison_table(experiment, found)
        assert line(table, "*mean of all*")[10:] == ["0.600", "-10.0 ± 14.1", "-10.0 ± 14.1 (Alone)"]
        assert "mean, digits*" in table
        assert "mean, DH 0%" not in table  # one setting each
        assert "(4 of 4)" in table

    def test_means_leave_out_incomplete_settings(self, experiment: Experiment) -> None:
        found = results(experiment, Alone=[0.6, 0.8], FedAvg=[0.7, 0.6], New=[0.6, 0.7])
        some = [r for r in found if not (r["cell"]["label"] == "FedAvg" and r["cell"]["dh"] == 0)]
        table = comparison_table(experiment, some)
        assert "(2 of 4)" in table
        assert line(table, "digits, DH 0%")[3:6] == ["–", "–", "–"]

    def test_served_may_be_missing(self, experiment: Experiment) -> None:
        found = results(experiment, Alone=[0.6, 0.8], FedAvg=[0.7, 0.6], New=[0.6, 0.7])
        table = comparison_table(experiment, [r for r in found if r["cell"]["label"] != "New"])
        assert line(table, "digits, DH 60%")[-2:] == ["–", "–"]


def test_choices_are_counted_over_clients_and_seeds(experiment: Experiment) -> None:
    table = served_table(experiment, results(experiment, Alone=[0.6, 0.8], FedAvg=[0.7, 0.6], New=[0.6, 0.7]))
    cells = line(table, "digits | 10 | 60%")
    assert cells[3] == "New"
    assert cells[9:] == ["0.750", "12%", "0%", "0%", "88%", "blend 2, alone 2"]


def test_foreign_classes_are_shown_where_clients_lack_classes(experiment: Experiment) -> None:
    table = foreign_table(experiment, results(experiment, Alone=[0.6, 0.8], FedAvg=[0.7, 0.6], New=[0.6, 0.7]))
    assert line(table, "method")[1:] == ["digits, DH 60%", "digits, rotated, DH 60%"]
    assert line(table, "New, without offset")[1] == "0.800 ± 0.000 (2)"
    assert line(table, "images")[1:] == ["300", "300"]
    assert "FedAvg, without offset" not in table


def test_convergence_compares_the_last_evaluation_before_80_percent_with_the_end(experiment: Experiment) -> None:
    table = convergence_table(experiment, results(experiment, Alone=[0.6, 0.8], FedAvg=[0.7, 0.6], New=[0.6, 0.7]))
    assert line(table, "digits | 10 | 60%")[3:] == [
        "0.680 → 0.700",
        "0.630 → 0.650",
        "0.630 → 0.650",
        "0.640 → 0.660",
    ]
    assert line(table, "*mean change*")[3] == "+2.00 points"


def test_accuracies_show_the_number_of_test_images(experiment: Experiment) -> None:
    found = results(experiment, Alone=[0.6, 0.8], FedAvg=[0.7, 0.6], New=[0.6, 0.7])
    found[0]["images"]["test"] = 90
    first, second = (part for part in accuracy_table(experiment, found).split("### ")[1:])
    assert line(first, "test images")[1:] == ["90 … 100", "100"]
    assert line(second, "test images")[1:] == ["100", "100"]
    assert line(accuracy_table(experiment, found[:1]), "Alone")[1] == "0.600 [0.497, 0.695]"
