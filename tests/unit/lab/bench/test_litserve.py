"""The bench's side of a comparison with LitServe, with a program that stands in for its environment's Python."""

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console
from support.waiting import eventually

from lab.bench.litserve import REQUIREMENT, open_litserve
from lab.bench.predict import PredictOptions, run_bench
from lab.demo.processes import Processes
from shared.contract.errors import DistransError

# Like LitServe, it works in a process that it started.
SERVER = """\
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.answer({})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.answer({"images": len(body["images"])})
    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass

description = json.loads(pathlib.Path(sys.argv[2]).read_text())
if os.fork() == 0:
    pathlib.Path(sys.argv[2]).with_name("worker").write_text(str(os.getpid()))
    http.server.ThreadingHTTPServer(("127.0.0.1", description["port"]), Handler).serve_forever()
os.wait()
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Return a folder with the stand-in, installed as far as the bench can tell."""
    folder = tmp_path / "peers" / "litserve" / "bin"
    folder.mkdir(parents=True)
    (folder.parent / "installed.txt").write_text(REQUIREMENT)
    write(folder / "python", SERVER)
    return folder


def write(program: Path, code: str) -> None:
    program.write_text(f"#!{sys.executable}\nimport http.server, json, os, pathlib, sys\n{code}")
    program.chmod(0o755)


def state_of(process_id: str) -> str:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads a process's state from Linux's /proc")
def test_all_of_its_processes_run_only_during_its_turns(programs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "litserve"
    with Processes(tmp_path / "logs") as processes:
        with open_litserve(processes, programs, folder, "lenet", "blend", max_batch=7, threads=1) as server:
            worker = (folder / "worker").read_text()
            eventually(lambda: state_of(worker) == "T")
            with server.running():
                eventually(lambda: state_of(worker) != "T")
            eventually(lambda: state_of(worker) == "T")
        eventually(lambda: state_of(worker) in ("gone", "Z"))
    description = json.loads((folder / "description.json").read_text())
    assert [description[name] for name in ("backbone", "served", "max_batch", "threads")] == ["lenet", "blend", 7, 1]


def test_end_of_its_program_is_reported(programs: Path, tmp_path: Path) -> None:
    write(programs / "python", "sys.exit('the port is taken')\n")
    with (
        Processes(tmp_path / "logs") as processes,
        pytest.raises(DistransError, match="litserve ended with code 1: the port is taken"),
        open_litserve(processes, programs, tmp_path / "litserve", "lenet", "offset", max_batch=7, threads=1),
    ):
        pass


def test_both_are_measured_in_turns(programs: Path, tmp_path: Path) -> None:
    output, report = io.StringIO(), tmp_path / "predict.json"
    peers = programs.parents[1]
    options = PredictOptions(["lenet"], [2], 10, served=["blend"], with_litserve=True, peers=peers, json=report)
    run_bench(Console(file=output, width=120), options)
    (load,) = json.loads(report.read_text())["networks"][0]["loads"]
    assert load["sides"].keys() == {"agent", "LitServe"}
    assert load["sides"]["LitServe"]["calls"] == 20
    assert load["agent_over_litserve"]["throughput"] > 0
    assert "agent ÷ LitServe" in output.getvalue()
