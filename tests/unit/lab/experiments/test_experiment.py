"""Experiment files: the cells they expand to, and errors in invalid ones."""

import re
from pathlib import Path
from typing import Any

import pytest

from lab.datasets.registry import KNOWN
from lab.experiments import Scale
from lab.experiments.experiment import (
    Experiment,
    ExperimentError,
    Small,
    experiment_files,
    find_experiment,
    load_experiment,
)
from lab.experiments.paper import paper_results, published
from lab.experiments.runs import select
from shared.contract.errors import DistransError

ROOT = Path(__file__).resolve().parents[4]
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
    def test_is_the_product_of_all_settings_except_excluded_methods(self) -> None:
        data = [{"name": "digits", "clients": [10], "dh": [0.0, 1.0]}]
        cells = experiment(data=data).cells("full")
        assert {(cell.dh, cell.label, cell.seed) for cell in cells} == {
            (dh, label, seed)
            for dh, label in ((0.0, "DisTrans"), (1.0, "DisTrans"), (1.0, "at 100 %"))
            for seed in (0, 1)
        }
        assert len({cell.id for cell in cells}) == len(cells) == 6

    def test_method_can_be_limited_to_values_of_the_varied_setting(self) -> None:
        methods = [
            {"label": "all", "method": {"name": "distrans"}},
            {"label": "some", "method": {"name": "distrans"}, "vary": [0.5]},
        ]
        data, vary = [{"name": "digits", "clients": [10], "dh": [0.8]}], {"key": "method.alpha", "values": [0.3, 0.5]}
        cells = experiment(data=data, methods=methods, vary=vary, seeds=[0]).cells("full")
        assert [(cell.varied, cell.label) for cell in cells] == [(0.3, "all"), (0.5, "all"), (0.5, "some")]

    def test_method_for_an_unknown_value_is_an_error(self, tmp_path: Path) -> None:
        file = written(tmp_path, SMALLEST + '\n[[methods]]\nlabel = "b"\nmethod = { name = "fedavg" }\nvary = [0.4]\n')
        with pytest.raises(ExperimentError, match=r"'b' is for 0\.4, which \[vary\] does not have"):
            load_experiment(file)

    def test_specific_settings_override_general_ones(self) -> None:
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
        assert first["model"]["activation"] == "none"  # from the paper preset
        again = cells[0].plan_for(tuple("abcdefghij"))
        assert again.model_dump(mode="json", exclude={"classes"}) == first

    def test_method_may_have_settings_for_one_data_set(self) -> None:
        methods = [{"label": "one", "method": {"name": "distrans"}, "on": {"digits": {"alpha": 0.1}}}]
        data = [{"name": name, "clients": [10], "dh": [0.0]} for name in ("digits", "cifar10")]
        cells = experiment(methods=methods, data=data, seeds=[0]).cells("full")
        assert [cell.plan["method"]["alpha"] for cell in cells] == [0.1, 0.3]

    def test_vary_changes_one_setting(self) -> None:
        vary = {"key": "method.alpha", "values": [0.1, 0.5]}
        data = [{"name": "digits", "clients": [10], "dh": [0.8]}]
        cells = experiment(vary=vary, data=data, seeds=[0]).cells("full")
        assert [(cell.varied, cell.plan["method"]["alpha"]) for cell in cells] == [(0.1, 0.1), (0.5, 0.5)]

    def test_small_replaces_what_it_names_and_its_plan_overrides_all(self) -> None:
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

    def test_id_depends_on_every_setting_and_nothing_else(self) -> None:
        data = [{"name": "digits", "clients": [10], "dh": [0.8]}]
        (one, _), (same, _) = (experiment(data=data).cells("full") for _ in range(2))
        (other, _) = experiment(data=data, plan={"training": {"weight_decay": 0.01}}).cells("full")
        (evaluated, _) = experiment(data=data, evaluate_every=2).cells("full")
        assert one.id == same.id
        assert len({one.id, other.id, evaluated.id}) == 3

    def test_id_is_that_of_earlier_releases_unless_updates_are_compressed(self) -> None:
        data = [{"name": "digits", "clients": [10], "dh": [0.8]}]
        plain, compressed = (
            experiment(data=data, plan={"training": {"update_compression": option}}).cells("full")[0]
            for option in ("none", "int8")
        )
        training = {name: value for name, value in plain.plan["training"].items() if name != "update_compression"}
        assert plain.id == plain.model_copy(update={"plan": plain.plan | {"training": training}}).id
        assert plain.id != compressed.id


class TestFaults:
    def test_in_the_file_are_reported_together(self, tmp_path: Path) -> None:
        text = SMALLEST.replace("rounds = 3", "rounds = 0\nround = 5").replace("dh = [0.8]", "dh = [80]")
        with pytest.raises(ExperimentError) as caught:
            load_experiment(written(tmp_path, text))
        assert "3 errors" in str(caught.value)
        for field in ("rounds:", "round:", "data.0.dh.0:"):
            assert field in str(caught.value)

    def test_in_plans_splits_and_data_are_reported_together_and_once_each(self) -> None:
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
        assert "Unknown data set 'cifar11'" in text
        assert "(DisTrans on digits)" in text
        with pytest.raises(ExperimentError, match=r"10 clients with 10 classes cannot have DH 33%.*They can have 0%"):
            experiment(data=[{"name": "digits", "clients": [10], "dh": [0.33]}]).cells("full")
        with pytest.raises(ExperimentError, match="digits has 10 classes, not 12"):
            experiment(data=[{"name": "digits", "clients": [10], "dh": [0.0], "classes": 12}]).cells("full")

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("name = ", "not valid TOML"),
            ('name = "try"\ntitle = "A try"', "data: at least one is required"),
            (
                SMALLEST + '[[methods]]\nlabel = "DisTrans"\nmethod = { name = "fedavg" }',
                "duplicate label 'DisTrans'",
            ),
            (SMALLEST.replace("rounds = 3", "seeds = [0, 1, 0]"), "seeds: duplicate seed 0"),
            (SMALLEST.replace("[0.8]", "[0.8, 0.8]"), "digits has a duplicate dh 0.8"),
            (
                SMALLEST + '[[data]]\nname = "digits"\ntrain_per_class = 9\nclients = [5, 10]\ndh = [0.8]',
                "two entries for digits have the same clients and DH; use two files",
            ),
            (SMALLEST.replace('{ name = "distrans" }', "{ alpha = 0.1 }"), "'DisTrans' has no method name"),
            (SMALLEST + "dh = [0.6]", "is for DH 0.6, which no"),
            (SMALLEST + "on = { digit = { alpha = 0.1 } }", "has settings for 'digit'"),
            (
                SMALLEST.replace("rounds = 3", 'compare = "B"'),
                "compare: no method with served = true has the label 'B'",
            ),
            (SMALLEST.replace("rounds = 3", 'paper = "table9"'), "paper: unknown table 'table9'; use one of table1"),
            (SMALLEST.replace("dh = [0.8]", 'dh = [0.8]\nstands_for = "mnist"'), "stands for unknown 'mnist'"),
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
    def test_across_fields_are_reported(self, text: str, words: str, tmp_path: Path) -> None:
        with pytest.raises(ExperimentError, match=words):
            load_experiment(written(tmp_path, text))

    def test_missing_file_lists_the_existing_ones(self) -> None:
        with pytest.raises(DistransError, match="table1"):
            find_experiment(Path("nowhere.toml"))


class TestFilters:
    @pytest.fixture
    def cells(self) -> Any:
        return experiment(data=[{"name": "digits", "clients": [10], "dh": [0.8, 1.0]}]).cells("full")

    @pytest.mark.parametrize("dh", ["dh=1.0", "dh=1", "dh=100%"])
    def test_select_cells_that_match_all(self, dh: str, cells: Any) -> None:
        chosen = select(cells, [dh, "method=distrans", "seed=1"])
        assert [(cell.dh, cell.label, cell.seed) for cell in chosen] == [(1.0, "DisTrans", 1)]

    def test_with_the_same_name_are_alternatives(self, cells: Any) -> None:
        assert select(cells, ["seed=0", "seed=1", "dh=0.8", "data=digits", "clients=10"]) == [
            cell for cell in cells if cell.dh == 0.8
        ]

    @pytest.mark.parametrize("only", ["dh", "color=red", "seed=9"])
    def test_without_matches_are_errors(self, only: str, cells: Any) -> None:
        with pytest.raises(ExperimentError):
            select(cells, [only])


FILES = experiment_files()
TABLES = [f"table{n}" for n in range(1, 8)]
EXPECTED = [
    "beyond-negatives",
    "beyond-nets",
    "beyond-shift",
    "compression",
    "fig-alpha",
    "fig-distribution",
    "fig-epochs",
    "fig-rounds",
    "fig-umap",
    "joining-wide",
    "joining",
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
    def test_small_forms_use_small_networks_and_available_data(self, file: Path) -> None:
        small = load_experiment(file).scaled("small")
        assert {entry.name for entry in small.data} <= {"cifar10", "digits", "fashion-mnist", "orl-faces"}
        used = {cell.plan["model"]["backbone"] for cell in load_experiment(file).cells("small")}
        assert used <= {"lenet", "lab.networks:deep", "lab.networks:deep_normed"}

    @pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
    def test_small_forms_keep_the_settings_of_their_measured_results(self, file: Path) -> None:
        for cell in load_experiment(file).cells("small"):
            model, image = cell.plan["model"], cell.plan["image"]
            assert model["backbone"] != "lenet" or (model["initialization"], model["activation"]) == ("torch", "relu")
            assert cell.data.name != "cifar10" or image["std"] == [0.2470, 0.2435, 0.2616]

    def test_published_numbers_match_the_experiments(self) -> None:
        """Every published number is found by the label, data set, clients and DH of its experiment."""
        for name in ("table1", "table2", "table3", "table4", "table5", "table6"):
            entries = load_experiment(find_experiment(Path(name)))
            labels = {method.label for method in entries.methods}
            for row in paper_results()[name]:
                assert row["values"].keys() <= labels, name
                entry = next(entry for entry in entries.data if entry.name == row["data"])
                assert row["clients"] in entry.clients
                assert row["dh"] in entry.dh

    def test_published_numbers_are_those_of_the_paper(self) -> None:
        assert published("table1", "cifar10", 10, 0.8, "DisTrans") == 0.891
        assert published("table1", "cifar10", 10, 0.8, "FedAwS") is None
        assert published("table4", "bird200", 10, 0.6, "nn+no (default)") == 0.551
        assert published("table6", "cifar100", 500, 0.9, "pFedHN-pc") == 0.372
        assert published(None, "cifar10", 10, 0.8, "DisTrans") is None


def test_example_in_the_guide_is_a_valid_experiment(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "reproducing.md").read_text()
    (example,) = re.findall(r"^```toml\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    mine = load_experiment(written(tmp_path, example))
    assert len(mine.cells("full")) == 12
    assert {(cell.rounds, cell.data.train_per_class) for cell in mine.cells("small")} == {(5, 100)}


def test_data_set_may_have_its_own_rounds_and_method_a_small_form() -> None:
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
