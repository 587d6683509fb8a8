"""`distrans-lab bench predict`: its measurements and what it computes from them."""

import io

import pytest
from rich.console import Console

from lab.bench.predict import PredictSpeed, run_bench


def test_consecutive_calls_are_compared() -> None:
    """The machine is ten times slower in the second half; the overhead is still that of most pairs."""
    bare = [0.002] * 5 + [0.02] * 4
    speed = PredictSpeed("lenet", bare, [0.003] * 5 + [0.03] * 4, [0.9, 2.0, 0.5])
    assert speed.overhead_s == pytest.approx(0.001)
    assert speed.time_ratio == pytest.approx(1.5)
    assert speed.throughput_ratio == 0.9


def test_service_is_measured_in_its_own_process() -> None:
    output = io.StringIO()
    run_bench(Console(file=output, width=120), ["lenet"], calls=10)
    (row,) = [line for line in output.getvalue().splitlines() if line.startswith("│")]
    name, *cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert (name, len(cells)) == ("lenet", 6)
    bare, p50, p99 = (float(cell.removesuffix(" ms")) for cell in cells[:3])
    assert bare > 0
    assert 0 < p50 <= p99
