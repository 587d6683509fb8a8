"""`distrans-lab bench predict`: its measurements and what it computes from them."""

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from lab.bench.predict import PredictOptions, run_bench
from lab.bench.predict_callers import Burst, BurstTimes, open_callers, request
from lab.bench.predict_report import LITSERVE, OURS, Comparison, Load, NetworkResult, Side, print_result


def load_of(bare: list[float], ours: list[float], peer: list[float] | None = None) -> Load:
    """Return bursts of two calls with these durations in seconds; half of each was processor time."""
    load = Load(callers=1, bare_seconds=bare, bare_cpu_s=bare)
    for name, seconds in [(OURS, ours), (LITSERVE, peer)]:
        if seconds is not None:
            side = load.sides[name] = Side()
            for one in seconds:
                side.add(BurstTimes(one, [one / 2, one / 2]), one / 2)
    return load


def test_bursts_are_compared_with_those_beside_them() -> None:
    """The machine is ten times slower in the last burst; the ratios are still those of most bursts."""
    load = load_of([1, 1, 10], [2, 2, 20], [4, 4, 40])
    assert load.bare_ratio(OURS) == pytest.approx(0.5)
    found = Comparison.of(load)
    assert found is not None
    assert (found.throughput, found.cpu) == (pytest.approx(2), pytest.approx(0.5))
    assert found.p99 < 1
    assert load.sides[OURS].calls_per_s == pytest.approx(6 / 24)
    assert load.sides[OURS].cpu_s_per_call == pytest.approx(2)


def test_unknown_processor_time_is_left_out() -> None:
    load = load_of([1, 1], [2, 2])
    load.sides[OURS].burst_cpu_s.clear()
    output = io.StringIO()
    print_result(Console(file=output, width=120), NetworkResult("lenet", "offset", [load]))
    assert Comparison.of(load) is None
    assert load.sides[OURS].cpu_s_per_call is None
    assert "–" in output.getvalue()


def test_service_is_measured_in_its_own_process(tmp_path: Path) -> None:
    output = io.StringIO()
    report, plot = tmp_path / "predict.json", tmp_path / "predict.png"
    run_bench(
        Console(file=output, width=120), PredictOptions(["lenet"], callers=[1, 3], calls=10, json=report, plot=plot)
    )
    networks = json.loads(report.read_text())["networks"]
    assert [(network["backbone"], network["served"]) for network in networks] == [
        ("lenet", "offset"),
        ("lenet", "blend"),
    ]
    for load in networks[0]["loads"]:
        ours = load["sides"]["agent"]
        assert (ours["calls"], len(ours["burst_seconds"])) == (10 * load["callers"], 5)
        assert 0 < ours["median_s"] <= ours["p99_s"]
        assert load["agent_over_litserve"] is None
    assert [load["callers"] for load in networks[0]["loads"]] == [1, 3]
    assert plot.stat().st_size > 0
    assert "lenet, blend" in output.getvalue()


class _Refusing(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_error(503, "no model")

    def log_message(self, *_: object) -> None:
        """Stay silent."""


def test_failed_call_ends_the_burst_with_its_answer() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refusing) as server, open_callers() as callers:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            for _ in range(2):  # the callers are ready for the next burst
                with pytest.raises(RuntimeError, match="503 no model"):
                    callers.run(Burst(server.server_port, request("/predict", b"{}"), callers=2, calls=4))
        finally:
            server.shutdown()
            thread.join()
