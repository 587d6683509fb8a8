"""The parts that benches share: exponents, output files, readings of /proc, peers' environments."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.bench.floor import open_floor
from lab.bench.outputs import check_outputs
from lab.bench.peer_venv import default_peers_folder, peer_programs
from lab.bench.scaling import fitted_exponent
from lab.bench.usage import cpu_seconds, disk_bytes, peak_memory_bytes
from lab.commands.bench import round_
from shared.contract.errors import DistransError


def test_exponent_of_a_power_law_is_found() -> None:
    assert fitted_exponent([1, 10, 100], [3, 300, 30_000]) == pytest.approx(2)
    assert fitted_exponent([5, 5], [1, 2]) is None


@pytest.mark.parametrize(
    ("json_file", "plot", "reason"),
    [
        ("missing/x.json", None, "folder of .* does not exist"),
        (None, "x.bmp", "no known format"),
    ],
)
def test_unusable_output_is_refused_before_anything_runs(
    tmp_path: Path, json_file: str | None, plot: str | None, reason: str
) -> None:
    with pytest.raises(DistransError, match=reason):
        check_outputs(json_file and tmp_path / json_file, plot and tmp_path / plot)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux's /proc")
def test_usage_counts_all_processes_of_a_session() -> None:
    inner = "x = bytearray(30_000_000); print(1, flush=True); input()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    assert peak_memory_bytes(child.pid) > 38_000_000  # the inner process and its parent
    assert cpu_seconds(child.pid) > 0
    child.communicate(b"\n")
    assert peak_memory_bytes(child.pid) is None
    assert cpu_seconds(child.pid) is None


def test_disk_space_is_that_of_blocks(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(100_000))
    os.truncate(tmp_path / "file", 100_000_000)  # a hole needs no space
    assert 100_000 <= disk_bytes(tmp_path) < 1_000_000


def test_floor_leaves_no_file(tmp_path: Path) -> None:
    with open_floor(3, 4_000, tmp_path) as floor:
        assert floor.run_round() > 0
        assert floor.run_round() > 0
    assert not list(tmp_path.iterdir())


def test_peers_are_kept_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_peers_folder() == Path("/cache/distrans/peers")


def test_failed_installation_is_reported(tmp_path: Path) -> None:
    occupied = tmp_path / "peers"
    occupied.write_text("not a folder")
    with pytest.raises(DistransError, match=r"Cannot install no-such-peer==1: .*directory.*--peers"):
        peer_programs(occupied, "peer", "no-such-peer==1")


@pytest.mark.parametrize("numbers", ["", "0", "ten", "10,,40", "-1"])
def test_lists_of_numbers_are_checked(numbers: str) -> None:
    with pytest.raises(DistransError, match=r"positive numbers, separated by commas. Example: --clients 10,40"):
        round_(clients=numbers)
