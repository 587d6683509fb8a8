"""Cells in child processes on this machine. A cell that fails is reported with its reason; the others continue."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from lab.experiments.cells import Cell, CellObserver, Workspace, encode_job, notify


class ProcessEngine:
    """Child processes that compute with one thread each. They end with this process, however it ends."""

    def __init__(self, workers: int, log: Path) -> None:
        self.workers = workers
        self._log = log
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopping = False

    def __call__(self, cells: Sequence[Cell], workspace: Workspace, observer: CellObserver) -> None:
        """Run all cells. An interruption kills the children and leaves the checkpoints."""
        waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
        for cell in cells:
            waiting.put(cell)
        count = min(self.workers, len(cells))
        with ThreadPoolExecutor(max(1, count)) as threads:
            try:
                futures = [threads.submit(self._serve, waiting, workspace, observer) for _ in range(count)]
                for future in futures:
                    future.result()
            except BaseException:
                self._stop()
                raise

    def _serve(self, waiting: "queue.SimpleQueue[Cell]", workspace: Workspace, observer: CellObserver) -> None:
        child: subprocess.Popen[str] | None = None
        try:
            while not self._stopping:
                try:
                    cell = waiting.get_nowait()
                except queue.Empty:
                    return
                if child is None or child.poll() is not None:
                    self._close(child)
                    child = self._start()
                    if child is None:
                        return
                outcome = self._ask(child, cell, workspace, observer)
                if not self._stopping:
                    with self._lock:
                        notify(observer, cell, outcome)
        finally:
            self._close(child)

    def _ask(
        self, child: "subprocess.Popen[str]", cell: Cell, workspace: Workspace, observer: CellObserver
    ) -> dict[str, Any]:
        assert child.stdin is not None and child.stdout is not None  # noqa: S101, PT018 - pipes, see _start
        try:
            child.stdin.write(encode_job(cell, workspace) + "\n")
            child.stdin.flush()
        except BrokenPipeError:
            pass  # the child has ended, which reading its output will show
        for line in child.stdout:
            message = _message(line)
            if message is None and not line.endswith("\n"):
                break  # the child ended while writing
            if message is None:
                child.kill()
                child.wait()  # else it would get the next cell
                reason = f"The worker process wrote {line.strip()[:80]!r}, which is not a message."
                return {"reason": reason, "details": f"See {self._log}."}
            if "round" not in message:
                return message
            with self._lock:
                if not self._stopping:
                    observer.on_round(cell, message["round"])
        code = child.wait()
        ended = "was killed, perhaps because memory ran out." if code == -signal.SIGKILL else f"ended with code {code}."
        return {"reason": f"The worker process {ended}", "details": f"See {self._log}."}

    def _start(self) -> "subprocess.Popen[str] | None":
        """Start a child; return None if the engine is stopping, because `_stop` would miss a later child."""
        with self._lock, self._log.open("ab") as log:
            if self._stopping:
                return None
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "lab.experiments.worker"],  # -P: import nothing from the current folder
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                text=True,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,  # only this process gets Ctrl-C from the terminal
            )
            self._running.add(child)
        return child

    def _close(self, child: "subprocess.Popen[str] | None") -> None:
        if child is None:
            return
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # a job that the child did not read
                    stream.close()
        child.wait()
        self._running.discard(child)

    def _stop(self) -> None:
        self._stopping = True
        with self._lock:
            for child in self._running:
                child.kill()


def _message(line: str) -> dict[str, Any] | None:
    """Parse a worker's message; return None if it is not one."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and message.keys() & {"round", "result", "reason"} else None
