"""The paper's experiments and its published numbers."""

import functools
import tomllib
from pathlib import Path
from typing import Any

from shared.problems import DistransError

_HERE = Path(__file__).parent
_FOLDERS = (_HERE / "_paper", _HERE.parent / "paper")  # in an installed package, in a clone


def experiment_files() -> list[Path]:
    """The experiment files that come with the project."""
    return next((sorted(folder.glob("*.toml")) for folder in _FOLDERS if folder.is_dir()), [])


def find_experiment(given: Path) -> Path:
    """The file itself, or the project's one that table1, table1.toml or paper/table1.toml means; no other path does."""
    if given.is_file():
        return given
    files = experiment_files()
    for file in files:
        if given in (Path(file.stem), Path(file.name), Path("paper", file.name)):
            return file
    what = "experiment" if given == Path(given.name) else "file"
    names = ", ".join(file.stem for file in files)
    raise DistransError(f"There is no {what} {given}.", next_step=f"Name a TOML file, or one of {names}.")


@functools.cache
def paper_results() -> dict[str, Any]:
    """lab/paper_results.toml."""
    return tomllib.loads((_HERE / "paper_results.toml").read_text(encoding="utf-8"))


def published(table: str | None, data: str, clients: int, dh: float, label: str) -> float | None:
    """The paper's accuracy for one place of a table; None where it has none."""
    for row in paper_results().get(table or "", []):
        if (row["data"], row["clients"]) == (data, clients) and abs(row["dh"] - dh) < 1e-9:
            value = row["values"].get(label)
            return None if value is None else float(value)
    return None
