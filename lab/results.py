"""The folder of an experiment's results: one JSON file a cell, and two CSV files made from all of them.

DIR/experiment.toml   the file that was run        DIR/cells/ID.json    a finished cell
DIR/results.csv       a line a cell                DIR/checkpoints/ID/  a cell under way
DIR/curves.csv        a line a cell and round      DIR/failed/ID.txt    why a cell has no result
"""

import csv
import fcntl
import io
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.cells import Cell
from lab.checkpoints import replace_text
from lab.datasets import DataSettings
from shared.problems import DistransError

Result = dict[str, Any]
_SETTINGS = ("experiment", "scale", "data", "stands_for", "clients", "dh", "label", "varied", "seed")


class Results:
    """One experiment at one scale."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def checkpoints(self) -> Path:
        """Where cells under way keep what they need to go on."""
        return self.folder / "checkpoints"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and keep other runs out of it for the length of the block."""
        for name in ("cells", "failed"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise DistransError(
                    f"Another run is writing to {self.folder}.", next_step="Wait for it, or name another --out."
                ) from error
            yield

    def has(self, cell: Cell) -> bool:
        """Whether the cell is done."""
        return self._file(cell).exists()

    def store(self, cell: Cell, result: Result) -> None:
        """Keep a result; the checkpoint goes, unless the trained model is wanted later."""
        replace_text(self._file(cell), json.dumps(result, indent=1))
        (self.folder / "failed" / f"{cell.id}.txt").unlink(missing_ok=True)
        if not cell.keep_model:
            shutil.rmtree(self.checkpoints / cell.id, ignore_errors=True)

    def store_failure(self, cell: Cell, reason: str, details: str) -> None:
        """Keep why a cell has no result."""
        replace_text(self.folder / "failed" / f"{cell.id}.txt", f"{cell.title}\n{reason}\n{details}")

    def load(self) -> list[Result]:
        """All finished cells, in a fixed order."""
        results = []
        for file in (self.folder / "cells").glob("[!.]*.json"):
            try:
                results.append(json.loads(file.read_text(encoding="utf-8")))
            except (OSError, ValueError) as error:
                raise DistransError(f"{file} cannot be read: {error}.", next_step="Delete it and run again.") from error
        return sorted(results, key=lambda result: json.dumps([result["cell"][name] for name in ("data", *_SETTINGS)]))

    def write_tables(self) -> None:
        """results.csv and curves.csv, from all finished cells."""
        results = self.load()
        replace_text(self.folder / "results.csv", _csv([_line(result) for result in results]))
        curves = [{"id": result["id"], **_settings(result), **row} for result in results for row in result["curve"]]
        replace_text(self.folder / "curves.csv", _csv(curves))

    def _file(self, cell: Cell) -> Path:
        return self.folder / "cells" / f"{cell.id}.json"


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
