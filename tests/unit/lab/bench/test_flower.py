"""The bench's side of a comparison with Flower, with programs that stand in for Flower's."""

import json
import sys
from pathlib import Path

import pytest
from support.waiting import eventually

from lab.bench.flower import open_flower
from lab.demo.processes import Processes
from shared.contract.errors import DistransError

# Like `flwr run`, it returns at once; the ServerApp runs elsewhere until its connection is closed.
RUN = """\
port = int(sys.argv[-1].partition("=")[2])
if os.fork():
    os._exit(0)
os.setsid()
os.dup2(os.open(os.devnull, os.O_RDWR), 1)
os.dup2(1, 2)
bench = socket.create_connection(("127.0.0.1", port)).makefile("rw")
description = json.loads(bench.readline())
nodes_file = pathlib.Path(os.environ["FLWR_HOME"], "nodes")
while not nodes_file.exists():
    time.sleep(0.05)
bench.write("ready\\n")
bench.flush()
while bench.readline():
    state = pathlib.Path("/proc", nodes_file.read_text(), "stat").read_text().rpartition(")")[2].split()[0]
    bench.write(json.dumps({"seconds": description["clients"] + sum(description["sizes"]), "aggregated": state != "T"}))
    bench.write("\\n")
    bench.flush()
"""
LINK = 'print("Uvicorn running on", flush=True)\ntime.sleep(600)\n'
NODES = """\
nodes_file = pathlib.Path(os.environ["FLWR_HOME"], "nodes")
nodes_file.with_name("new").write_text(str(os.getpid()))
nodes_file.with_name("new").rename(nodes_file)
time.sleep(600)
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Return a folder with stand-ins for Flower's programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, code in {"flower-superlink": LINK, "python": NODES, "flwr": RUN}.items():
        write(folder / name, code)
    return folder


def write(program: Path, code: str) -> None:
    program.write_text(f"#!{sys.executable}\nimport json, os, pathlib, socket, sys, time\n{code}")
    program.chmod(0o755)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads a process's state from Linux's /proc")
def test_nodes_run_only_during_flowers_rounds(programs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "flower"
    with Processes(tmp_path / "logs") as processes, open_flower(processes, programs, folder, 3, [10, 20]) as flower:
        assert [flower.run_round(), flower.run_round()] == [33, 33]
        nodes = processes.process_id("flower-nodes")
        eventually(lambda: Path(f"/proc/{nodes}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    assert not Path(f"/proc/{nodes}").exists()
    assert json.loads((folder / "description.json").read_text()) == {"clients": 3, "sizes": [10, 20]}


def test_refused_run_is_reported(programs: Path, tmp_path: Path) -> None:
    write(programs / "flwr", "sys.exit('no such federation')\n")
    with (
        Processes(tmp_path / "logs") as processes,
        pytest.raises(DistransError, match=r"Flower refused the run: no such federation .*--with-flower"),
        open_flower(processes, programs, tmp_path / "flower", 1, [1]),
    ):
        pass


def test_end_of_a_program_of_flowers_is_reported(programs: Path, tmp_path: Path) -> None:
    write(programs / "flower-superlink", "sys.exit('the port is taken')\n")
    with (
        Processes(tmp_path / "logs") as processes,
        pytest.raises(DistransError, match="flower-superlink ended with code 1: the port is taken"),
        open_flower(processes, programs, tmp_path / "flower", 1, [1]),
    ):
        pass
