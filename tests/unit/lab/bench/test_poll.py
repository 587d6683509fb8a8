"""`distrans-lab bench poll`: its measurements and what it computes from them."""

import io
import json
from pathlib import Path

from rich.console import Console

from lab.bench.poll import PollCost, run_bench


def test_delays_are_those_of_the_median_and_the_last_client() -> None:
    cost = PollCost(0.01, 0.1, 0.2, [0.3, 0.5, 0.9])
    assert (cost.median_s, cost.last_s) == (0.5, 0.9)


def test_coordinator_and_bare_server_are_measured_in_one_run(tmp_path: Path) -> None:
    output, file = io.StringIO(), tmp_path / "poll.json"
    run_bench(Console(file=output, width=120), 20, 1, None, file)
    rows = [line for line in output.getvalue().splitlines() if line.startswith("│")]
    assert [row.strip("│").split("│")[0].strip() for row in rows] == ["coordinator", "bare server"]
    found = json.loads(file.read_text())
    assert found["clients"] == 20
    for name in ("coordinator", "bare_server"):
        assert len(found[name]["learned_s"]) == 20
        assert 0 < found[name]["median_s"] <= found[name]["last_s"]
        assert found[name]["idle_share"] >= 0
