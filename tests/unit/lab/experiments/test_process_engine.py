"""The process engine with misbehaving workers; test_engines.py has well-behaved ones."""

import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from lab.experiments.cells import Cell, Workspace
from lab.experiments.experiment import Experiment
from lab.experiments.process_engine import ProcessEngine

FINE = """while read -r job; do echo '{"round": 1}'; echo '{"result": {}}'; done"""
CELLS = Experiment.model_validate(
    {
        "name": "try",
        "title": "A try",
        "seeds": [0, 1, 2],
        "data": [{"name": "digits", "clients": [10], "dh": [1.0]}],
        "methods": [{"label": "FedAvg", "method": {"name": "fedavg"}}],
    }
).cells("full")


class Recorder:
    """Records what the engine reports for each cell, by seed."""

    def __init__(self) -> None:
        self.ends: dict[int, str] = {}

    def on_round(self, cell: Cell, done: int) -> None:
        assert done == 1
        assert cell.seed not in self.ends

    def on_finished(self, cell: Cell, result: dict[str, Any]) -> None:
        assert result == {}
        self.ends[cell.seed] = "finished"

    def on_failed(self, cell: Cell, reason: str, details: str) -> None:
        assert "workers.log" in details
        self.ends[cell.seed] = reason


def run(first: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """Run three cells with this shell script as the first worker and good ones after it."""
    python, mark = folder / "python", shlex.quote(str(folder / "mark"))
    python.write_text(f"#!/bin/sh\nif [ ! -e {mark} ]; then\n: > {mark}\n{first}\nelse\n{FINE}\nfi\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    recorder = Recorder()
    ProcessEngine(1, folder / "workers.log")(CELLS, Workspace(folder, folder), recorder)
    return recorder.ends


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo Hello; exec sleep 600", "The worker process wrote 'Hello', which is not a message."),
        ("printf '\\377\\n'; exec sleep 600", "The worker process wrote '\ufffd', which is not a message."),
        ("echo 42; exec sleep 600", "The worker process wrote '42', which is not a message."),
        ("echo '{}'; exec sleep 600", "The worker process wrote '{}', which is not a message."),
        ("kill -9 $$", "The worker process was killed, perhaps because memory ran out."),
        ("printf '{\"rou'; kill -9 $$", "The worker process was killed, perhaps because memory ran out."),
        ("exit 3", "The worker process ended with code 3."),
    ],
)
def test_failing_worker_costs_only_its_cell_and_gives_the_reason(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(script, tmp_path, monkeypatch) == {0: reason, 1: "finished", 2: "finished"}


def test_worker_that_ends_before_reading_a_job_costs_only_that_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "read -r job; exec 0<&-; echo '{\"result\": {}}'; exec 1>&-; sleep 1; exit 3"  # time to get another job
    ends = run(script, tmp_path, monkeypatch)
    assert ends == {0: "finished", 1: "The worker process ended with code 3.", 2: "finished"}


class InterruptedWhileStarting(ProcessEngine):
    """Gets Ctrl-C after a thread checked whether to stop, before it starts its child."""

    def __init__(self, log: Path) -> None:
        super().__init__(1, log)
        self.stopped, self.over = threading.Event(), threading.Event()
        self.children: list[object] = []

    def _start(self) -> "subprocess.Popen[str] | None":
        os.kill(os.getpid(), signal.SIGINT)
        self.stopped.wait(10)
        child = super()._start()
        self.children.append(child)
        self.over.set()
        return child

    def _stop(self) -> None:
        super()._stop()
        self.stopped.set()


def test_ctrl_c_just_before_a_worker_starts_prevents_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    engine = InterruptedWhileStarting(tmp_path / "workers.log")
    with pytest.raises(KeyboardInterrupt):
        engine(CELLS, Workspace(tmp_path, tmp_path), Recorder())
    assert engine.stopped.is_set()
    assert engine.over.wait(60)
    assert engine.children == [None]
