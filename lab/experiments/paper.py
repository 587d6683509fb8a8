"""The numbers that the paper published."""

import functools
import tomllib
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


@functools.cache
def paper_results() -> dict[str, Any]:
    """Return the content of lab/experiments/paper_results.toml."""
    return tomllib.loads((_HERE / "paper_results.toml").read_text(encoding="utf-8"))


def published(table: str | None, data: str, clients: int, dh: float, label: str) -> float | None:
    """Return the paper's accuracy for one entry of a table; None if the paper has none."""
    for row in paper_results().get(table or "", []):
        if (row["data"], row["clients"]) == (data, clients) and abs(row["dh"] - dh) < 1e-9:
            value = row["values"].get(label)
            return None if value is None else float(value)
    return None
