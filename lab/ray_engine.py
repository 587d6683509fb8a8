"""Cells as tasks of a Ray cluster: the one that RAY_ADDRESS names, else a new one on this machine.

On a cluster the data root and the results folder must be the same folders on every node.
"""

import json
import os
from collections.abc import Sequence
from typing import Any

from lab.cells import Cell, Workspace
from lab.engines import Listener, attempt, decode_job, encode_job, tell
from shared.problems import DistransError

_POLL_S = 0.5


class _RoundCounts:
    """An actor that tasks report to."""

    def __init__(self) -> None:
        self._news: dict[str, int] = {}

    def report(self, cell_id: str, done: int) -> None:
        self._news[cell_id] = done

    def take(self) -> dict[str, int]:
        news, self._news = self._news, {}
        return news


def _task(job: str, counts: Any) -> str:
    import torch

    torch.set_num_threads(1)
    cell, workspace = decode_job(job)
    return json.dumps(attempt(cell, workspace, lambda done: counts.report.remote(cell.id, done)))


class RayEngine:
    """Up to `workers` cells at a time."""

    def __init__(self, workers: int) -> None:
        try:
            import ray
        except ImportError as error:
            raise DistransError("Ray is not installed.", next_step="pip install 'distrans[ray]'") from error
        self._ray = ray
        self.workers = workers

    def __call__(self, cells: Sequence[Cell], workspace: Workspace, listener: Listener) -> None:
        """Run all cells; an interruption leaves their checkpoints."""
        ray = self._ray
        if address := os.environ.get("RAY_ADDRESS"):
            ray.init(address=address, log_to_driver=False)
        else:
            # A cell computes with one thread; the counts' actor takes no core.
            ray.init(address="local", num_cpus=self.workers, include_dashboard=False, log_to_driver=False)
        try:
            self._run(cells, workspace, listener)
        finally:
            ray.shutdown()

    def _run(self, cells: Sequence[Cell], workspace: Workspace, listener: Listener) -> None:
        ray = self._ray
        counts = ray.remote(num_cpus=0)(_RoundCounts).remote()
        task = ray.remote(num_cpus=1, max_retries=0)(_task)
        by_id, waiting = {cell.id: cell for cell in cells}, list(cells)[::-1]
        running: dict[Any, Cell] = {}
        while waiting or running:
            while waiting and len(running) < self.workers:
                cell = waiting.pop()
                running[task.remote(encode_job(cell, workspace), counts)] = cell
            done, _ = ray.wait(list(running), timeout=_POLL_S)
            for cell_id, rounds in ray.get(counts.take.remote()).items():
                listener.on_round(by_id[cell_id], rounds)
            for reference in done:
                cell = running.pop(reference)
                try:
                    answer = json.loads(ray.get(reference))
                except ray.exceptions.RayError as error:
                    answer = {"reason": f"The Ray task ended: {str(error).splitlines()[0]}", "details": str(error)}
                tell(listener, cell, answer)
