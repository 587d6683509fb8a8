"""The results folder of an experiment: one JSON file per cell, and two CSV files with all of them.

DIR/experiment.toml   the experiment file             DIR/cells/ID.json    a finished cell
DIR/results.csv       one row per cell                DIR/checkpoints/ID/  an unfinished cell, or a kept model
DIR/curves.csv        one row per cell and round      DIR/failed/ID.txt    why a cell has no result

Cells stored by an earlier version may lack newer settings. They are read with the plain defaults of those settings and
get the matching id; their files keep their names.
"""

import csv
import io
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lab.datasets.registry import DataSettings
from lab.experiments.cells import ALONE, PLACEHOLDER_CLASSES, Cell
from lab.simulation.simulation import Checkpoint
from shared.contract.errors import DistransError
from shared.contract.plan import read_stored_plan
from shared.system.files import locked, write_durably

Result = dict[str, Any]
_SETTINGS = ("experiment", "scale", "data", "stands_for", "clients", "dh", "label", "varied", "seed")
_PARTS = {"cell": dict, "curve": list, "last": dict, "best": dict, "bytes_per_round": dict, "seconds": int | float}


@dataclass
class _Contents:
    results: dict[str, Result] = field(default_factory=dict)
    former_ids: dict[str, str] = field(default_factory=dict)  # present id → former id, if they differ
    broken: list[Path] = field(default_factory=list)


class Results:
    """An experiment's results. The files are read once, and again when the folder is locked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._contents: _Contents | None = None

    @property
    def checkpoints(self) -> Path:
        """The folder of the cells' checkpoints."""
        return self.folder / "checkpoints"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder and keep other runs out of it during the block.

        Renames models kept by an earlier version, so that this version finds them.
        """
        for name in ("cells", "failed"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        busy = DistransError(
            f"Another run is writing to {self.folder}.", next_step="Wait for it, or use another --out."
        )
        with locked(self.folder / ".lock", busy, mode=0o666):
            self._contents = None
            for present, former in self._read().former_ids.items():
                if (self.checkpoints / former).is_dir() and not (self.checkpoints / present).exists():
                    (self.checkpoints / former).rename(self.checkpoints / present)
            yield

    def has(self, cell: Cell) -> bool:
        """Return whether the cell has all it should have: a result, its final evaluation, and a model if kept."""
        kept = not cell.keep_model or Checkpoint(self.checkpoints / cell.id).exists()
        result = self._read().results.get(cell.id)
        return kept and result is not None and set(cell.final) <= set(result["cell"]["final"])

    def store(self, cell: Cell, result: Result) -> None:
        """Store a result; delete the checkpoint unless the model is needed later."""
        text = json.dumps(result, indent=1)
        _write(self.folder / "cells" / f"{cell.id}.json", text)
        self._read().results[cell.id] = json.loads(text)
        (self.folder / "failed" / f"{cell.id}.txt").unlink(missing_ok=True)
        unneeded = self.checkpoints / cell.id
        shutil.rmtree(unneeded / ALONE if cell.keep_model else unneeded, ignore_errors=True)

    def store_failure(self, cell: Cell, reason: str, details: str) -> None:
        """Store why a cell has no result."""
        _write(self.folder / "failed" / f"{cell.id}.txt", f"{cell.title}\n{reason}\n{details}")

    def failure(self, cell: Cell) -> str | None:
        """Return in one line why a cell has no result; None if it has not run or was interrupted."""
        try:
            lines = (self.folder / "failed" / f"{cell.id}.txt").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return None
        return lines[1] if len(lines) > 1 else None

    def load(self) -> list[Result]:
        """Return all finished cells of any experiment and scale, in their present form and in a fixed order.

        Omits cells that this version can no longer run, and files that are not results.
        """
        return sorted(
            self._read().results.values(),
            key=lambda result: json.dumps([result["cell"][name] for name in ("data", *_SETTINGS)]),
        )

    def of(self, cells: Iterable[Cell]) -> list[Result]:
        """Return the results of the finished cells among these, in the order of `load`."""
        ids = {cell.id for cell in cells}
        return [result for result in self.load() if result["id"] in ids]

    def broken(self) -> list[Path]:
        """Return files that should be results but are not, such as truncated ones."""
        return self._read().broken

    def write_tables(self, cells: Iterable[Cell]) -> None:
        """Write results.csv and curves.csv for the finished cells among these."""
        results = self.of(cells)
        _write(self.folder / "results.csv", _csv([_line(result) for result in results]))
        named = [({"id": result["id"], **_settings(result)}, result["curve"]) for result in results]
        curves = [{**settings, **row} for settings, curve in named for row in curve]
        _write(self.folder / "curves.csv", _csv(curves))

    def _read(self) -> _Contents:
        if self._contents is None:
            contents = _Contents()
            for file in sorted((self.folder / "cells").glob("[!.]*.json")):
                _read_into(contents, file)
            self._contents = contents
        return self._contents


def _read_into(contents: _Contents, file: Path) -> None:
    try:
        result = json.loads(file.read_bytes())
    except ValueError:
        result = None
    if not _is_result(result):
        contents.broken.append(file)
        return
    try:
        cell = _present(result["cell"])
    except ValidationError:
        return
    present = cell.id
    if file.stem == present:
        contents.former_ids.pop(present, None)
    elif present in contents.results:
        return  # the cell ran again since
    else:
        contents.former_ids[present] = file.stem
    contents.results[present] = result | {"id": present, "cell": cell.model_dump(mode="json")}


def _is_result(read: Any) -> bool:
    return (
        isinstance(read, dict)
        and all(isinstance(read.get(name), kind) for name, kind in _PARTS.items())
        and all({"round", "accuracy"} <= row.keys() for row in (read["last"], read["best"]))
    )


def _present(stored: dict[str, Any]) -> Cell:
    """Return the cell with plain defaults for missing settings, not with what its preset sets today."""
    cell = Cell.model_validate(stored)
    plan = read_stored_plan(json.dumps({**cell.plan, "classes": PLACEHOLDER_CLASSES}))
    return cell.model_copy(update={"plan": plan.model_dump(mode="json", exclude={"classes"})})


def data_of(result: Result) -> str:
    """Return the display name of a result's data set."""
    return DataSettings(**result["cell"]["data"]).title


def _settings(result: Result) -> dict[str, Any]:
    cell = result["cell"]
    return {name: cell[name] for name in _SETTINGS} | {"data": data_of(result)}


def _line(result: Result) -> dict[str, Any]:
    moved = {f"bytes_{name}": value for name, value in result["bytes_per_round"].items()}
    best = {"best_round": result["best"]["round"], "best_accuracy": result["best"]["accuracy"]}
    final = {
        f"final_{name}": counted["correct"] / counted["samples"] if counted["samples"] else None
        for name, counted in result.get("final", {}).items()
    }
    settings = {"id": result["id"], **_settings(result)}
    return {**settings, **result["last"], **best, **final, **moved, "seconds": result["seconds"]}


def _csv(lines: list[dict[str, Any]]) -> str:
    if not lines:
        return ""
    text = io.StringIO()
    columns = dict.fromkeys(name for line in lines for name in line)  # results of an older version may lack some
    writer = csv.DictWriter(text, fieldnames=list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _write(file: Path, text: str) -> None:
    write_durably(file, text.encode(), mode=0o644)
