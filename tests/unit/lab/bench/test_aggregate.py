"""`distrans-lab bench aggregate`: its measurements and what it computes from them."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from lab.bench.aggregate import MeanSpeed, measure, run_bench


def test_consecutive_additions_are_compared() -> None:
    """The machine is ten times slower in the second half; the ratio is still that of most pairs."""
    floor = [0.001] * 3 + [0.01] * 2
    speed = MeanSpeed("uniform", 4_000_000, floor, [0.002] * 3 + [0.02] * 2, result_s=0.005, state_bytes=8_000_000)
    assert speed.speed_ratio == pytest.approx(0.5)
    assert speed.floor_bytes_per_s == pytest.approx(4e9)
    assert speed.mean_bytes_per_s == pytest.approx(2e9)
    assert speed.result_ratio == pytest.approx(5)
    assert speed.memory_ratio == 2


def test_first_update_is_not_counted() -> None:
    speed = measure(model_bytes=5_000_000, updates=3, weights="samples")
    assert len(speed.floor_s) == len(speed.mean_s) == 3


def test_table_and_file_have_both_kinds_of_weights(tmp_path: Path) -> None:
    output, file = io.StringIO(), tmp_path / "mean.json"
    run_bench(Console(file=output, width=120), 1, 2, file)
    rows = [line.strip("│").split("│") for line in output.getvalue().splitlines() if line.startswith("│")]
    assert [(row[0].strip(), len(row)) for row in rows] == [("uniform", 6), ("samples", 6)]
    uniform, samples = json.loads(file.read_text())
    assert (uniform["weights"], samples["weights"]) == ("uniform", "samples")
    assert uniform["speed_ratio"] > 0
    assert len(uniform["mean_s"]) == 2
