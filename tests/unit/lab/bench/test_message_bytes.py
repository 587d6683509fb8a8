"""`distrans-lab bench bytes`: sizes of real messages."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from support.compression import OPTIONS

from lab.bench.message_bytes import measure, run_bench
from shared.contract.method_options import METHOD_NAMES

# LeNet with 10 classes at 3×64×64: 6 and 16 filters, 26×26 positions after them, 100 features.
LENET = 4 * ((3 * 25 + 1) * 6 + (6 * 25 + 1) * 16 + (16 * 26 * 26 + 1) * 100 + (100 + 1) * 10)
OFFSET = 4 * 3 * 64 * 64


def test_every_method_is_compared_with_plain_weights() -> None:
    rows = {row.method: row for row in measure("lenet")}
    compressed = {name for name in rows if name.endswith(OPTIONS)}
    assert rows.keys() - compressed == {*METHOD_NAMES, "distrans, offsets aggregated"}
    assert {row.weights for row in rows.values()} == {LENET}
    fedavg, distrans, aggregated = rows["fedavg"], rows["distrans"], rows["distrans, offsets aggregated"]
    assert LENET < fedavg.update < LENET + 2000  # a header and a report
    assert fedavg.up_share == pytest.approx(1, abs=0.001)
    assert OFFSET < distrans.personal < OFFSET + 200
    assert OFFSET < aggregated.update - distrans.update < OFFSET + 200


def test_compressed_updates_are_a_fraction_of_plain_weights_and_everything_else_stays_the_same() -> None:
    rows = {row.method: row for row in measure("lenet")}
    for method in ("fedavg", "distrans", "distrans, offsets aggregated"):
        plain = rows[method]
        expected = {"bf16": 0.5, "int8": (1 + 4 / 256) / 4, "int4": (1 / 2 + 4 / 64) / 4}
        for option, share in expected.items():
            row = rows[f"{method}, {option}"]
            assert (row.update - OFFSET * (method[-1] == "d")) / row.weights == pytest.approx(share, rel=0.005)
            assert (row.personal, row.weights) == (plain.personal, plain.weights)


def test_hypernetworks_that_a_coordinator_refuses_are_left_out(tmp_path: Path) -> None:
    file, output = tmp_path / "bytes.json", io.StringIO()
    run_bench(Console(file=output, width=120), ["resnet18"], file)
    methods = [row["method"] for row in json.loads(file.read_text())]
    assert "fedavg" in methods
    assert not [name for name in methods if name.startswith("pfedhn")]
    assert "fedavg" in output.getvalue()
