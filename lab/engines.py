"""Three ways to run cells: one after another, in processes on this machine, or on Ray. All call the same `attempt`.

Processes and Ray tasks are given and give back JSON text. A cell that fails is told to the listener with its reason;
the others go on.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from lab.cells import Cell, Workspace, run_cell
from shared.problems import DistransError


class Listener(Protocol):
    """Is told what happens to cells; never by two threads at once."""

    def on_round(self, cell: Cell, done: int) -> None:
        """So many rounds are done; the first call means that the cell has started."""

    def on_finished(self, cell: Cell, result: dict[str, Any]) -> None:
        """The cell is done."""

    def on_failed(self, cell: Cell, reason: str, details: str) -> None:
        """The cell has ended without a result."""


Engine = Callable[[Sequence[Cell], Workspace, Listener], None]


def attempt(cell: Cell, workspace: Workspace, on_round: Callable[[int], None]) -> dict[str, Any]:
    """`{"result": …}`, or `{"reason": …, "details": …}` of what went wrong."""
    try:
        return {"result": run_cell(cell, workspace, on_round)}
    except DistransError as error:
        return {"reason": str(error), "details": ""}
    except Exception as error:  # one cell's fault must not take the others along
        return {"reason": f"{type(error).__name__}: {error}", "details": traceback.format_exc()}


def tell(listener: Listener, cell: Cell, answer: dict[str, Any]) -> None:
    """Pass an attempt's outcome on."""
    if "result" in answer:
        listener.on_finished(cell, answer["result"])
    else:
        listener.on_failed(cell, answer["reason"], answer["details"])


def encode_job(cell: Cell, workspace: Workspace) -> str:
    """A cell and its workspace as one line of text."""
    places = {
        "data_root": str(workspace.data_root.absolute()),
        "checkpoints": str(workspace.checkpoints.absolute()),
        "device": workspace.device,
    }
    return json.dumps({"cell": cell.model_dump(mode="json"), "workspace": places})


def decode_job(text: str) -> tuple[Cell, Workspace]:
    """The other way round."""
    job = json.loads(text)
    places = job["workspace"]
    workspace = Workspace(Path(places["data_root"]), Path(places["checkpoints"]), places["device"])
    return Cell.model_validate(job["cell"]), workspace


def run_sequentially(cells: Sequence[Cell], workspace: Workspace, listener: Listener) -> None:
    """One cell after another in this process."""
    for cell in cells:

        def on_round(done: int, cell: Cell = cell) -> None:
            listener.on_round(cell, done)

        tell(listener, cell, attempt(cell, workspace, on_round))


class ProcessEngine:
    """A number of child processes, each computing with one thread; they end with this one, however it ends."""

    def __init__(self, workers: int, log: Path) -> None:
        self.workers = workers
        self._log = log
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopping = False

    def __call__(self, cells: Sequence[Cell], workspace: Workspace, listener: Listener) -> None:
        """Run all cells; an interruption stops the children at once, their checkpoints stay."""
        waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
        for cell in cells:
            waiting.put(cell)
        count = min(self.workers, len(cells))
        with ThreadPoolExecutor(max(1, count)) as threads:
            try:
                futures = [threads.submit(self._serve, waiting, workspace, listener) for _ in range(count)]
                for future in futures:
                    future.result()
            except BaseException:
                self._stop()
                raise

    def _serve(self, waiting: "queue.SimpleQueue[Cell]", workspace: Workspace, listener: Listener) -> None:
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
                answer = self._ask(child, cell, workspace, listener)
                if not self._stopping:
                    with self._lock:
                        tell(listener, cell, answer)
        finally:
            self._close(child)

    def _ask(
        self, child: "subprocess.Popen[str]", cell: Cell, workspace: Workspace, listener: Listener
    ) -> dict[str, Any]:
        assert child.stdin is not None and child.stdout is not None  # noqa: S101, PT018 - made so in _start
        try:
            child.stdin.write(encode_job(cell, workspace) + "\n")
            child.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, and reading says so
        for line in child.stdout:
            message = _message(line)
            if message is None and not line.endswith("\n"):
                break  # it ended in the middle of a word
            if message is None:
                child.kill()
                child.wait()  # or it would be given the next cell
                reason = f"The worker process gave no answer but {line.strip()[:80]!r}."
                return {"reason": reason, "details": f"See {self._log}."}
            if "round" not in message:
                return message
            with self._lock:
                if not self._stopping:
                    listener.on_round(cell, message["round"])
        code = child.wait()
        ended = "was killed; out of memory?" if code == -signal.SIGKILL else f"ended with code {code}."
        return {"reason": f"The worker process {ended}", "details": f"See {self._log}."}

    def _start(self) -> "subprocess.Popen[str] | None":
        """Start a child; None when the engine is stopping, because `_stop` kills only those that it finds running."""
        with self._lock, self._log.open("ab") as log:
            if self._stopping:
                return None
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "lab.worker"],  # -P: no module of the folder that we happen to be in
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                text=True,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,  # Ctrl-C reaches it through this process alone
            )
            self._running.add(child)
        return child

    def _close(self, child: "subprocess.Popen[str] | None") -> None:
        if child is None:
            return
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # a job that it did not live to read
                    stream.close()
        child.wait()
        self._running.discard(child)

    def _stop(self) -> None:
        self._stopping = True
        with self._lock:
            for child in self._running:
                child.kill()


def _message(line: str) -> dict[str, Any] | None:
    """What a worker says; None if a worker does not say such things."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and message.keys() & {"round", "result", "reason"} else None
