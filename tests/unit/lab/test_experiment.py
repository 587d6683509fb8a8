"""Experiment files: what they expand to, and what is said of faulty ones."""

import re
from pathlib import Path
from typing import Any

import pytest

from lab.datasets import KNOWN
from lab.experiment import Experiment, ExperimentError, Scale, Small, load_experiment, merge
from lab.paper import experiment_files, find_experiment, paper_results, published
from lab.runs import select
from shared.problems import DistransError

ROOT = Path(__file__).resolve().parents[3]
SMALLEST = """
name = "try"
title = "A try"
rounds = 3
[[data]]
name = "digits"
clients = [10]
dh = [0.8]
[[methods]]
label = "DisTrans"
method = { name = "distrans" }
"""


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "try.toml"
    file.write_text(text)
    return file


def experiment(**changes: Any) -> Experiment:
    plain: dict[str, Any] = {
        "name": "try",
        "title": "A try",
        "rounds": 3,
        "seeds": [0, 1],
        "data": [{"name": "digits", "clients": [10, 20], "dh": [0.0, 1.0]}],
        "methods": [
            {"label": "DisTrans", "method": {"name": "distrans"}},
            {"label": "at 100 %", "method": {"name": "fedavg"}, "dh": [1.0]},
        ],
    }
    return Experiment.model_validate(plain | changes)


class TestExpansion:
    def test_is_the_product_of_everything_but_where_a_method_is_left_out(self) -> None:
        data = [{"name": "digits", "clients": [10], "dh": [0.0, 1.0]}]
        cells = experiment(data=data).cells("full")
        assert {(cell.dh, cell.label, cell.seed) for cell in cells} == {
            (dh, label, seed)
            for dh, label in ((0.0, "DisTrans"), (1.0, "DisTrans"), (1.0, "at 100 %"))
            for seed in (0, 1)
        }
        assert len({cell.id for cell in cells}) == len(cells) == 6

    def test_a_method_can_be_left_out_at_values_of_the_varied_setting(self) -> None:
        methods = [
            {"label": "all", "method": {"name": "distrans"}},
            {"label": "some", "method": {"name": "distrans"}, "vary": [0.5]},
        ]
        data, vary = [{"name": "digits", "clients": [10], "dh": [0.8]}], {"key": "method.alpha", "values": [0.3, 0.5]}
        cells = experiment(data=data, methods=methods, vary=vary, seeds=[0]).cells("full")
        assert [(cell.varied, cell.label) for cell in cells] == [(0.3, "all"), (0.5, "all"), (0.5, "some")]

    def test_a_method_for_a_value_that_does_not_occur_is_an_error(self, tmp_path: Path) -> None:
        file = written(tmp_path, SMALLEST + '\n[[methods]]\nlabel = "b"\nmethod = { name = "fedavg" }\nvary = [0.4]\n')
        with pytest.raises(ExperimentError, match=r"'b' is for 0\.4, which is no value of \[vary\]"):
            load_experiment(file)

    def test_completes_each_plan_from_the_common_to_the_special(self) -> None:
        cells = experiment(
            data=[{"name": "digits", "clients": [10], "dh": [0.8], "plan": {"training": {"lr": 0.2, "epochs": 2}}}],
            methods=[
                {"label": "a", "method": {"name": "distrans"}, "plan": {"training": {"epochs": 3}}},
                {"label": "b", "method": {"name": "distrans"}, "preset": "learned-offset"},
            ],
            plan={"training": {"lr": 0.1, "batch_size": 8}, "rounds": {"sample_fraction": 0.5}},
            seeds=[7],
        ).cells("full")
        first, second = (cell.plan for cell in cells)
        assert (first["training"]["lr"], first["training"]["epochs"], first["training"]["batch_size"]) == (0.2, 3, 8)
        assert first["rounds"] | {"count": 3, "sample_fraction": 0.5} == first["rounds"]
        assert (first["seed"], first["image"]["channels"], first["image"]["height"]) == (7, 1, 16)
        assert (first["method"]["offset_optimizer"], second["method"]["offset_optimizer"]) == ("sgd", "adam")
        assert first["model"]["activation"] == "none"  # of the paper preset
        again = cells[0].plan_for(tuple("abcdefghij"))
        assert again.model_dump(mode="json", exclude={"classes"}) == first

    def test_a_method_may_say_more_on_some_data(self) -> None:
        methods = [{"label": "one", "method": {"name": "distrans"}, "on": {"digits": {"alpha": 0.1}}}]
        data = [{"name": name, "clients": [10], "dh": [0.0]} for name in ("digits", "cifar10")]
        cells = experiment(methods=methods, data=data, seeds=[0]).cells("full")
        assert [cell.plan["method"]["alpha"] for cell in cells] == [0.1, 0.3]

    def test_varies_one_setting(self) -> None:
        vary = {"key": "method.alpha", "values": [0.1, 0.5]}
        data = [{"name": "digits", "clients": [10], "dh": [0.8]}]
        cells = experiment(vary=vary, data=data, seeds=[0]).cells("full")
        assert [(cell.varied, cell.plan["method"]["alpha"]) for cell in cells] == [(0.1, 0.1), (0.5, 0.5)]

    def test_small_takes_the_place_of_what_it_names_and_its_plan_has_the_last_word(self) -> None:
        small = {
            "rounds": 2,
            "seeds": [5],
            "train_per_class": 30,
            "plan": {"training": {"lr": 0.5}},
            "data": [
                {"name": "fashion-mnist", "classes": 8, "clients": [8], "dh": [0.5], "stands_for": "ch-mnist"},
                {"name": "digits", "clients": [10], "dh": [0.8], "train_per_class": 9, "plan": {"training": {"lr": 1}}},
            ],
        }
        cells = experiment(small=small).cells("small")
        assert [(c.data.name, c.data.classes, c.data.train_per_class, c.seed, c.rounds) for c in cells] == [
            ("fashion-mnist", 8, 30, 5, 2),
            ("digits", None, 9, 5, 2),
        ]
        assert [(cell.plan["training"]["lr"], cell.scale) for cell in cells] == [(0.5, "small")] * 2
        full = experiment(small=small, data=[{"name": "digits", "clients": [10], "dh": [0.8]}]).cells("full")
        assert {(cell.data.train_per_class, cell.rounds, cell.scale) for cell in full} == {(None, 3, "full")}

    def test_an_id_depends_on_every_setting_and_on_nothing_else(self) -> None:
        data = [{"name": "digits", "clients": [10], "dh": [0.8]}]
        (one, _), (same, _) = (experiment(data=data).cells("full") for _ in range(2))
        (other, _) = experiment(data=data, plan={"training": {"weight_decay": 0.01}}).cells("full")
        (evaluated, _) = experiment(data=data, evaluate_every=2).cells("full")
        assert one.id == same.id
        assert len({one.id, other.id, evaluated.id}) == 3


class TestFaults:
    def test_of_the_file_are_named_together(self, tmp_path: Path) -> None:
        text = SMALLEST.replace("rounds = 3", "rounds = 0\nround = 5").replace("dh = [0.8]", "dh = [80]")
        with pytest.raises(ExperimentError) as caught:
            load_experiment(written(tmp_path, text))
        assert "3 faults" in str(caught.value)
        for field in ("rounds:", "round:", "data.0.dh.0:"):
            assert field in str(caught.value)

    def test_of_plans_splits_and_data_are_named_together_and_once_each(self) -> None:
        wrong = experiment(
            plan={"training": {"lr": -1}, "modell": {}},
            data=[
                {"name": "digits", "clients": [10], "dh": [0.0], "plan": {"image": {"height": 5}}},
                {"name": "cifar11", "clients": [10], "dh": [0.0]},
            ],
        )
        with pytest.raises(ExperimentError) as caught:
            wrong.cells("full")
        text = str(caught.value)
        assert text.count("training.lr:") == text.count("modell:") == 1
        assert "There is no data set named 'cifar11'" in text
        assert "(DisTrans on digits)" in text
        with pytest.raises(ExperimentError, match=r"10 clients with 10 classes cannot have DH 33%.*They can have 0%"):
            experiment(data=[{"name": "digits", "clients": [10], "dh": [0.33]}]).cells("full")
        with pytest.raises(ExperimentError, match="digits has 10 classes, not 12"):
            experiment(data=[{"name": "digits", "clients": [10], "dh": [0.0], "classes": 12}]).cells("full")

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("name = ", "not valid TOML"),
            ('name = "try"\ntitle = "A try"', "data: at least one is needed"),
            (
                SMALLEST + '[[methods]]\nlabel = "DisTrans"\nmethod = { name = "fedavg" }',
                "two have the label 'DisTrans'",
            ),
            (SMALLEST.replace("rounds = 3", "seeds = [0, 1, 0]"), "seeds: 0 is there twice"),
            (SMALLEST.replace("[0.8]", "[0.8, 0.8]"), "digits has dh 0.8 twice"),
            (
                SMALLEST + '[[data]]\nname = "digits"\ntrain_per_class = 9\nclients = [5, 10]\ndh = [0.8]',
                "two are digits with the same clients and DH; use two files",
            ),
            (SMALLEST.replace('{ name = "distrans" }', "{ alpha = 0.1 }"), "'DisTrans' names no method"),
            (SMALLEST + "dh = [0.6]", "is for DH 0.6, which no"),
            (SMALLEST + "on = { digit = { alpha = 0.1 } }", "has settings on 'digit'"),
            (SMALLEST.replace("rounds = 3", 'paper = "table9"'), "paper: there is no 'table9'; there are table1"),
            (SMALLEST.replace("dh = [0.8]", 'dh = [0.8]\nstands_for = "mnist"'), "stands for 'mnist'"),
            (
                SMALLEST.replace("[[data]]", "plan = { seed = 1, rounds = { count = 7 } }\n[[data]]"),
                "plan: seed has no effect here: use seeds\n.*rounds.count has no effect here",
            ),
            (
                SMALLEST + '[vary]\nkey = "rounds.count"\nvalues = [1, 2]',
                "vary: rounds.count cannot be varied",
            ),
        ],
    )
    def test_of_the_whole_are_said(self, text: str, words: str, tmp_path: Path) -> None:
        with pytest.raises(ExperimentError, match=words):
            load_experiment(written(tmp_path, text))

    def test_a_file_that_is_not_there_lists_those_that_are(self) -> None:
        with pytest.raises(DistransError, match="table1"):
            find_experiment(Path("nowhere.toml"))


class TestFilters:
    @pytest.fixture
    def cells(self) -> Any:
        return experiment(data=[{"name": "digits", "clients": [10], "dh": [0.8, 1.0]}]).cells("full")

    @pytest.mark.parametrize("dh", ["dh=1.0", "dh=1", "dh=100%"])
    def test_leave_the_cells_that_meet_all(self, dh: str, cells: Any) -> None:
        chosen = select(cells, [dh, "method=distrans", "seed=1"])
        assert [(cell.dh, cell.label, cell.seed) for cell in chosen] == [(1.0, "DisTrans", 1)]

    def test_of_one_name_are_alternatives(self, cells: Any) -> None:
        assert select(cells, ["seed=0", "seed=1", "dh=0.8", "data=digits", "clients=10"]) == [
            cell for cell in cells if cell.dh == 0.8
        ]

    @pytest.mark.parametrize("only", ["dh", "colour=red", "seed=9"])
    def test_that_cannot_be_met_are_errors(self, only: str, cells: Any) -> None:
        with pytest.raises(ExperimentError):
            select(cells, [only])


FILES = experiment_files()
TABLES = [f"table{n}" for n in range(1, 8)]
EXPECTED = [
    "beyond-negatives",
    "beyond-nets",
    "beyond-shift",
    "fig-alpha",
    "fig-distribution",
    "fig-epochs",
    "fig-rounds",
    "fig-umap",
    "motivation",
    *TABLES,
]


class TestPaper:
    def test_has_one_file_for_every_table_and_figure(self) -> None:
        assert [file.stem for file in FILES] == EXPECTED
        table1 = FILES[EXPECTED.index("table1")]
        assert find_experiment(Path("table1.toml")) == find_experiment(Path("table1")) == table1
        assert find_experiment(table1) == table1

    @pytest.mark.parametrize("scale", ["full", "small"])
    @pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
    def test_files_expand_to_federations_that_can_be_run(self, file: Path, scale: Scale) -> None:
        whole = load_experiment(file)
        assert whole.name == file.stem
        cells = whole.cells(scale)
        if whole.kind != "federations":
            assert cells == []
            return
        assert {cell.label for cell in cells} == {method.label for method in whole.methods}
        assert all(cell.stands_for in (None, *KNOWN) for cell in cells)

    @pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
    def test_small_forms_use_small_networks_and_data_that_can_be_had(self, file: Path) -> None:
        small = load_experiment(file).scaled("small")
        assert {entry.name for entry in small.data} <= {"cifar10", "fashion-mnist", "orl-faces"}
        used = {cell.plan["model"]["backbone"] for cell in load_experiment(file).cells("small")}
        assert used <= {"lenet", "lab.networks:deep", "lab.networks:deep_normed"}

    def test_numbers_stand_at_the_places_of_the_experiments(self) -> None:
        """Every number of the paper is found by the label, data, clients and DH of its experiment."""
        for name in ("table1", "table2", "table3", "table4", "table5", "table6"):
            entries = load_experiment(find_experiment(Path(name)))
            labels = {method.label for method in entries.methods}
            for row in paper_results()[name]:
                assert row["values"].keys() <= labels, name
                entry = next(entry for entry in entries.data if entry.name == row["data"])
                assert row["clients"] in entry.clients
                assert row["dh"] in entry.dh

    def test_some_numbers_of_the_paper(self) -> None:
        assert published("table1", "cifar10", 10, 0.8, "DisTrans") == 0.891
        assert published("table1", "cifar10", 10, 0.8, "FedAwS") is None
        assert published("table4", "bird200", 10, 0.6, "nn+no (default)") == 0.551
        assert published("table6", "cifar100", 500, 0.9, "pFedHN-pc") == 0.372
        assert published(None, "cifar10", 10, 0.8, "DisTrans") is None


def test_merging_goes_into_tables() -> None:
    assert merge({"a": {"b": 1, "c": 2}, "d": 1}, {"a": {"c": 3}, "d": {"e": 1}}) == {
        "a": {"b": 1, "c": 3},
        "d": {"e": 1},
    }


def test_the_guides_example_is_an_experiment(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "reproducing.md").read_text()
    (example,) = re.findall(r"^```toml\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    mine = load_experiment(written(tmp_path, example))
    assert len(mine.cells("full")) == 12
    assert {(cell.rounds, cell.data.train_per_class) for cell in mine.cells("small")} == {(5, 100)}


def test_a_set_may_have_rounds_of_its_own_and_a_method_a_small_form() -> None:
    tried = experiment(
        data=[
            {"name": "digits", "clients": [10], "dh": [0.8], "rounds": 7},
            {"name": "cifar10", "clients": [10], "dh": [0.8]},
        ],
        methods=[{"label": "MOON", "method": {"name": "moon", "mu": 5.0}, "small": {"mu": 0.1}}],
        seeds=[0],
    )
    assert [cell.rounds for cell in tried.cells("full")] == [7, 3]
    smaller = tried.model_copy(update={"small": Small(rounds=2)})
    assert [cell.rounds for cell in smaller.cells("small")] == [2, 2]
    for scale, mu in (("full", 5.0), ("small", 0.1)):
        assert {cell.plan["method"]["mu"] for cell in tried.cells(scale)} == {mu}
