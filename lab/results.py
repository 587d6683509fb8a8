"""The folder of an experiment's results: one JSON file a cell, and two CSV files made from all of them.

DIR/experiment.toml   the file that was run        DIR/cells/ID.json    a finished cell
DIR/results.csv       a line a cell                DIR/checkpoints/ID/  a cell under way
DIR/curves.csv        a line a cell and round      DIR/failed/ID.txt    why a cell has no result

An earlier version may have stored a cell before some setting existed. Such a cell is read with that setting's plain
default and has the id that goes with it; the name of its file stays.
"""

import csv
import fcntl
import io
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lab.cells import Cell
from lab.checkpoints import Checkpoint, replace_text
from lab.datasets import DataSettings
from shared.plan import read_stored_plan
from shared.problems import DistransError

Result = dict[str, Any]
_SETTINGS = ("experiment", "scale", "data", "stands_for", "clients", "dh", "label", "varied", "seed")
_PARTS = {"cell": dict, "curve": list, "last": dict, "best": dict, "bytes_per_round": dict, "seconds": int | float}


@dataclass
class _Contents:
    results: dict[str, Result] = field(default_factory=dict)
    former_ids: dict[str, str] = field(default_factory=dict)  # by present id, where it is another
    broken: list[Path] = field(default_factory=list)


class Results:
    """An experiment's results; the files are read once, and again when the folder is locked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._contents: _Contents | None = None

    @property
    def checkpoints(self) -> Path:
        """Where cells under way keep what they need to go on."""
        return self.folder / "checkpoints"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and keep other runs out of it for the length of the block.

        Models that an earlier version kept go to the places where this one looks for them.
        """
        for name in ("cells", "failed"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise DistransError(
                    f"Another run is writing to {self.folder}.", next_step="Wait for it, or name another --out."
                ) from error
            self._contents = None
            for present, former in self._read().former_ids.items():
                if (self.checkpoints / former).is_dir() and not (self.checkpoints / present).exists():
                    (self.checkpoints / former).rename(self.checkpoints / present)
            yield

    def has(self, cell: Cell) -> bool:
        """Whether the cell is done, and its trained model there if it is wanted later."""
        kept = not cell.keep_model or Checkpoint(self.checkpoints / cell.id).is_there()
        return kept and cell.id in self._read().results

    def store(self, cell: Cell, result: Result) -> None:
        """Keep a result; the checkpoint goes, unless the trained model is wanted later."""
        text = json.dumps(result, indent=1)
        replace_text(self.folder / "cells" / f"{cell.id}.json", text)
        self._read().results[cell.id] = json.loads(text)
        (self.folder / "failed" / f"{cell.id}.txt").unlink(missing_ok=True)
        if not cell.keep_model:
            shutil.rmtree(self.checkpoints / cell.id, ignore_errors=True)

    def store_failure(self, cell: Cell, reason: str, details: str) -> None:
        """Keep why a cell has no result."""
        replace_text(self.folder / "failed" / f"{cell.id}.txt", f"{cell.title}\n{reason}\n{details}")

    def failure(self, cell: Cell) -> str | None:
        """Why a cell has no result, in a line; None if it was not tried, or was stopped."""
        try:
            lines = (self.folder / "failed" / f"{cell.id}.txt").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return None
        return lines[1] if len(lines) > 1 else None

    def load(self) -> list[Result]:
        """All finished cells in their present form, of whatever experiment and scale, each once, in a fixed order.

        Those that this version could not run any more are left out, and so are files that hold no result.
        """
        return sorted(
            self._read().results.values(),
            key=lambda result: json.dumps([result["cell"][name] for name in ("data", *_SETTINGS)]),
        )

    def of(self, cells: Iterable[Cell]) -> list[Result]:
        """The results of these cells, as far as they are done, in the order of `load`."""
        ids = {cell.id for cell in cells}
        return [result for result in self.load() if result["id"] in ids]

    def broken(self) -> list[Path]:
        """Files in the place of results that hold none, such as one cut off by a crash."""
        return self._read().broken

    def write_tables(self, cells: Iterable[Cell]) -> None:
        """results.csv and curves.csv, from those of these cells that are finished."""
        results = self.of(cells)
        replace_text(self.folder / "results.csv", _csv([_line(result) for result in results]))
        named = [({"id": result["id"], **_settings(result)}, result["curve"]) for result in results]
        curves = [{**settings, **row} for settings, curve in named for row in curve]
        replace_text(self.folder / "curves.csv", _csv(curves))

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
        return  # it was run again since
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
    """The cell, with the settings that it lacks at their plain defaults: presets may say more by now, but not of it."""
    cell = Cell.model_validate(stored)
    plan = read_stored_plan(json.dumps({**cell.plan, "classes": ("a", "b")}))
    return cell.model_copy(update={"plan": plan.model_dump(mode="json", exclude={"classes"})})


def data_of(result: Result) -> str:
    """The data set of a result, for people."""
    return DataSettings(**result["cell"]["data"]).title


def _settings(result: Result) -> dict[str, Any]:
    cell = result["cell"]
    return {name: cell[name] for name in _SETTINGS} | {"data": data_of(result)}


def _line(result: Result) -> dict[str, Any]:
    moved = {f"bytes_{name}": value for name, value in result["bytes_per_round"].items()}
    best = {"best_round": result["best"]["round"], "best_accuracy": result["best"]["accuracy"]}
    return {"id": result["id"], **_settings(result), **result["last"], **best, **moved, "seconds": result["seconds"]}


def _csv(lines: list[dict[str, Any]]) -> str:
    if not lines:
        return ""
    text = io.StringIO()
    columns = dict.fromkeys(name for line in lines for name in line)  # an older version's results may lack some
    writer = csv.DictWriter(text, fieldnames=list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()
