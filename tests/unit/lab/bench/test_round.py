"""`distrans-lab bench round`: real coordinators in a tiny form, and what remains of them."""

import io
import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import psycopg
import pytest
from rich.console import Console
from support.processes import LoggedProcess
from support.waiting import eventually

from lab.bench import thin_client
from lab.bench.round import RoundOptions, run_bench
from lab.bench.round_plan import model_bytes, plan_of_size
from lab.bench.round_report import RoundRow, SizeResult
from lab.bench.swarm import RoundTimes
from server.store.objects.addresses import open_store
from shared.contract.errors import DistransError


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that temporary files go to."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def run_tiny(tmp_path: Path, **options: Any) -> tuple[dict[str, Any], str]:
    """Run one round of two clients; return its results, and what was printed."""
    file, output = tmp_path / "round.json", io.StringIO()
    run_bench(Console(file=output, width=120), RoundOptions([2], [0.02], rounds=1, json=file, **options))
    (size,) = json.loads(file.read_text())["sizes"]
    return size, output.getvalue()


def test_round_is_measured_and_leaves_nothing(tmp_path: Path, scratch: Path) -> None:
    plot = tmp_path / "round.png"
    size, printed = run_tiny(tmp_path, plot=plot)
    (row,) = size["rounds"]
    assert size["storage"] == "SQLite"
    assert 0 < row["tail_s"] < row["seconds"]
    assert row["floor_s"] > 0
    assert row["cpu_s"] > 0
    assert row["peak_memory_bytes"] >= size["idle_memory_bytes"] > 2**20
    assert row["disk_bytes"] > 3 * size["update_bytes"]  # two updates and at least one model
    assert row["flower_s"] is None
    assert size["median_floor_ratio"] == pytest.approx(row["seconds"] / row["floor_s"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "÷ floor" in printed
    assert not list(scratch.iterdir())


def test_database_and_prefix_are_removed(
    tmp_path: Path, scratch: Path, postgres_url: str, bucket: str, requests: list[str]
) -> None:
    """The updates are sent as agents send large ones."""
    size, _ = run_tiny(tmp_path, database=postgres_url, blobs=bucket)
    assert size["storage"] == "PostgreSQL and s3:// blobs"
    assert size["rounds"][0]["disk_bytes"] is None  # a bucket does not tell
    assert {"HEAD", "PATCH"} < set(requests)
    assert "PUT" not in requests
    assert not list(scratch.iterdir())
    assert not list(open_store(bucket).list_keys())
    with psycopg.connect(postgres_url) as connection:
        names = connection.execute("SELECT datname FROM pg_database").fetchall()
    assert not [name for (name,) in names if name.startswith("distrans-bench")]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the methods of all requests that clients send; small updates count as large."""
    sent: list[str] = []
    request = thin_client.ThinClient._request

    def spy(self: thin_client.ThinClient, method: str, *arguments: Any, **options: Any) -> Any:
        sent.append(method)
        return request(self, method, *arguments, **options)

    monkeypatch.setattr(thin_client, "RESUMABLE_BYTES", 1000)
    monkeypatch.setattr(thin_client.ThinClient, "_request", spy)
    return sent


def test_unusable_place_for_blobs_is_reported(tmp_path: Path, scratch: Path) -> None:
    with pytest.raises(DistransError, match="DISTRANS_BLOBS"):
        run_tiny(tmp_path, blobs="ftp://somewhere/else")
    assert not list(scratch.iterdir())


def test_unreachable_database_is_reported(tmp_path: Path, scratch: Path) -> None:
    with pytest.raises(DistransError, match=r"(?s)Cannot create a database .* CREATEDB"):
        run_tiny(tmp_path, database="postgresql://127.0.0.1:1/nothing")
    assert not list(scratch.iterdir())


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in Linux's /proc")
def test_ctrl_c_stops_everything(scratch: Path) -> None:
    sizes = ["--clients", "2", "--megabytes", "0.02", "--rounds", "1000"]
    bench = LoggedProcess(["distrans-lab", "bench", "round", *sizes], forked=True, TMPDIR=str(scratch))
    try:
        logs = "distrans-bench-*/*/logs/*.log"
        eventually(lambda: any("startup complete" in log.read_text() for log in scratch.glob(logs)), timeout_s=300)
        assert users_of(scratch / "distrans-bench-")
    finally:
        bench.process.send_signal(signal.SIGINT)
        code = bench.wait()
    assert code == 130
    assert not list(scratch.glob("distrans-bench-*"))
    assert not users_of(scratch / "distrans-bench-")


def users_of(folder: Path) -> list[int]:
    """Return the processes that name a folder which begins like this in their command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if os.fsencode(folder) in words:
            found.append(int(process.name))
    return found


@pytest.mark.parametrize(("megabytes", "backbone"), [(0.02, "lenet"), (4.35, "lenet"), (44.8, "resnet18")])
def test_plan_has_about_the_size(megabytes: float, backbone: str) -> None:
    plan = plan_of_size(megabytes, clients=3, rounds=2)
    assert plan.model.backbone == backbone
    assert model_bytes(plan) == pytest.approx(megabytes * 1e6, rel=0.2 if megabytes < 1 else 0.01)


def test_impossible_size_is_refused() -> None:
    with pytest.raises(DistransError, match=r"no network of 1e\+09 MB"):
        plan_of_size(1e9, clients=1, rounds=1)


def test_round_lasts_until_every_client_knows_what_is_next() -> None:
    times = RoundTimes(started=10.0, acknowledged=[11.0, 12.0], announced=[12.5, 13.0], ready=[14.0, 13.0])
    assert (times.seconds, times.tail_s) == (4.0, 0.5)


def test_warm_up_is_not_summarized() -> None:
    rows = [
        RoundRow(1, seconds=9.0, floor_s=1.0, flower_s=9.0),
        RoundRow(2, seconds=2.0, floor_s=1.0, flower_s=20.0),
        RoundRow(3, seconds=4.0, floor_s=1.0, flower_s=20.0),
    ]
    result = SizeResult("SQLite", 2, 1000, None, rows)
    assert (result.seconds, result.floor_ratio, result.flower_ratio) == (3.0, 3.0, 7.5)
