"""The results folder: which cells count as finished, also after an upgrade. Trains nothing."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lab.experiments.cells import Cell
from lab.experiments.experiment import Experiment, experiment_files, load_experiment
from lab.experiments.results import Results

METHODS = [
    {"label": "DisTrans", "method": {"name": "distrans"}},
    {"label": "learned", "preset": "learned-offset", "method": {}},
]


def experiment(**changes: Any) -> Experiment:
    data = {"name": "digits", "train_per_class": 16, "clients": [10], "dh": [0.8, 1.0]}
    given = {"name": "try", "title": "A try", "rounds": 3, "seeds": [0], "data": [data], "methods": METHODS}
    return Experiment.model_validate(given | changes)


def result_of(cell: Cell) -> dict[str, Any]:
    curve = [{"round": number, "accuracy": number / 10} for number in (1, 2, 3)]
    result = {"id": cell.id, "cell": cell.model_dump(mode="json"), "curve": curve, "last": curve[-1], "best": curve[-1]}
    return result | {"bytes_per_round": {"up": 1}, "seconds": 1}


def write(folder: Path, *results: Any) -> None:
    (folder / "cells").mkdir(exist_ok=True)
    for result in results:
        (folder / "cells" / f"{result['id']}.json").write_text(json.dumps(result))


def of_an_earlier_version(cell: Cell) -> dict[str, Any]:
    """Return a result as stored before clip_norm, upload_grace_s and negatives existed."""
    result = result_of(cell) | {"id": f"old-{cell.id}"}
    del result["cell"]["plan"]["training"]["clip_norm"]
    del result["cell"]["plan"]["rounds"]["upload_grace_s"]
    del result["cell"]["negatives"]
    return result


def ids(results: list[dict[str, Any]]) -> set[str]:
    return {result["id"] for result in results}


class TestAfterAnUpgrade:
    def test_finished_cells_get_their_present_ids(self, tmp_path: Path) -> None:
        cells = experiment().cells("full")
        write(tmp_path, *map(of_an_earlier_version, cells))
        results = Results(tmp_path)
        assert all(results.has(cell) for cell in cells)
        assert {r["id"]: r["cell"] for r in results.load()} == {c.id: c.model_dump(mode="json") for c in cells}

    def test_cell_that_ran_again_does_not_count_twice(self, tmp_path: Path) -> None:
        cell = experiment().cells("full")[0]
        write(tmp_path, of_an_earlier_version(cell))
        results = Results(tmp_path)
        results.store(cell, result_of(cell) | {"seconds": 2})
        for seen in (results, Results(tmp_path)):
            assert [(result["id"], result["seconds"]) for result in seen.load()] == [(cell.id, 2)]

    def test_newer_preset_settings_do_not_apply_to_older_cells(self, tmp_path: Path) -> None:
        cell = next(cell for cell in experiment().cells("full") if cell.label == "learned")
        old = result_of(cell)
        assert old["cell"]["plan"]["method"].pop("offset_bound") is not None
        write(tmp_path, old)
        assert not Results(tmp_path).has(cell)

    def test_cell_that_can_no_longer_run_is_omitted(self, tmp_path: Path) -> None:
        known, other = experiment().cells("full")[:2]
        old = result_of(other)
        old["cell"]["plan"]["training"]["dropped_since"] = 1
        write(tmp_path, result_of(known), old)
        assert ids(Results(tmp_path).load()) == {known.id}
        assert Results(tmp_path).broken() == []

    def test_kept_model_is_found(self, tmp_path: Path) -> None:
        cell = experiment(figure="umap").cells("full")[0]
        write(tmp_path, of_an_earlier_version(cell))
        keep_model(tmp_path, f"old-{cell.id}")
        results = Results(tmp_path)
        with results.locked():
            assert results.has(cell)

    @pytest.mark.parametrize("file", experiment_files(), ids=lambda file: file.stem)
    def test_present_cells_keep_their_ids(self, file: Path, tmp_path: Path) -> None:
        by_label = {cell.label: cell for cell in load_experiment(file).cells("small")}
        write(tmp_path, *map(result_of, by_label.values()))
        assert ids(Results(tmp_path).load()) == {cell.id for cell in by_label.values()}


def keep_model(folder: Path, cell_id: str) -> None:
    checkpoint = folder / "checkpoints" / cell_id
    checkpoint.mkdir(parents=True)
    save_file({"weight": torch.ones(1)}, checkpoint / "server-3.safetensors")
    content = {"round": 3, "server": "server-3.safetensors", "clients": {}, "notes": {}}
    (checkpoint / "checkpoint.json").write_text(json.dumps(content))


@pytest.mark.parametrize("lost", ["", "checkpoint.json", "server-3.safetensors"])
def test_cell_whose_model_is_needed_is_not_finished_without_it(lost: str, tmp_path: Path) -> None:
    cell = experiment(figure="umap").cells("full")[0]
    write(tmp_path, result_of(cell))
    keep_model(tmp_path, cell.id)
    assert Results(tmp_path).has(cell)
    checkpoint = tmp_path / "checkpoints" / cell.id
    if lost:
        (checkpoint / lost).unlink()
    else:
        shutil.rmtree(checkpoint)
    assert not Results(tmp_path).has(cell)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b'{"id": "a", "cel', b"\xff\xfe\x00", b'{"id": "a", "cell": {}}']
)
def test_file_that_is_not_a_result_counts_as_unfinished(content: bytes, tmp_path: Path) -> None:
    done, cell = experiment().cells("full")[:2]
    write(tmp_path, result_of(done))
    file = tmp_path / "cells" / f"{cell.id}.json"
    file.write_bytes(content)
    results = Results(tmp_path)
    assert not results.has(cell)
    assert ids(results.load()) == {done.id}
    assert results.broken() == [file]


def test_tables_have_only_the_requested_cells(tmp_path: Path) -> None:
    cells, earlier = experiment().cells("full"), experiment(rounds=2).cells("full")
    write(tmp_path, *map(result_of, [*cells[1:], *earlier]))
    results = Results(tmp_path)
    assert ids(results.of(cells)) == {cell.id for cell in cells[1:]}
    results.write_tables(cells)
    for name, lines in (("results", 1), ("curves", 3)):
        with (tmp_path / f"{name}.csv").open() as handle:
            found = [line["id"] for line in csv.DictReader(handle)]
        assert sorted(found) == sorted(cell.id for cell in cells[1:] for _ in range(lines))


def test_reason_of_a_failed_cell_is_one_line(tmp_path: Path) -> None:
    cell = experiment().cells("full")[0]
    results = Results(tmp_path)
    with results.locked():
        assert results.failure(cell) is None
        results.store_failure(cell, "It diverged.", "Traceback")
        assert results.failure(cell) == "It diverged."
        results.store(cell, result_of(cell))
        assert results.failure(cell) is None


def test_tables_keep_columns_that_older_results_lack(finished: tuple[Path, int, str], tmp_path: Path) -> None:
    shutil.copytree(finished[0] / "cells", tmp_path / "cells")
    oldest = min((tmp_path / "cells").iterdir())
    result = json.loads(oldest.read_text())
    for row in (result["last"], *result["curve"]):
        del row["foreign_offset_accuracy"]
    oldest.write_text(json.dumps(result))
    Results(tmp_path).write_tables(load_experiment(finished[0] / "experiment.toml").cells("full"))
    assert all("foreign_offset_accuracy" in (tmp_path / f"{name}.csv").read_text() for name in ("results", "curves"))
