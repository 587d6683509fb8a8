"""Cells as tasks on a Ray cluster: the one at RAY_ADDRESS, or a new one on this machine.

All nodes of a cluster must see the data root and the results folder under the same paths. If a node or process is
lost, its cell runs again from its last checkpoint, on any node with room.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from lab.experiments.cells import Cell, CellObserver, Workspace, attempt, decode_job, encode_job, notify
from lab.experiments.round_counts import RoundCounts
from shared.contract.errors import DistransError

_POLL_S = 0.5
_ATTEMPTS = 4  # per cell, so that one that always crashes its process ends
_HOW_TO_SIGN_IN = (
    "Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH=FILE for a file with the cluster's token; "
    "`ray get-auth-token` prints it on a node of the cluster."
)


def _task(job: str, counts: Any) -> str:
    import torch

    torch.set_num_threads(1)
    cell, workspace = decode_job(job)
    return json.dumps(attempt(cell, workspace, lambda done: counts.report.remote(cell.id, done)))


class RayEngine:
    """Runs up to `workers` cells at a time."""

    def __init__(self, workers: int) -> None:
        try:
            import ray
        except ImportError as error:
            raise DistransError("Ray is not installed.", next_step="pip install 'distrans[ray]'") from error
        self._ray = ray
        self.workers = workers

    def __call__(self, cells: Sequence[Cell], workspace: Workspace, observer: CellObserver) -> None:
        """Run all cells. An interruption leaves their checkpoints."""
        self._connect()
        try:
            self._run(cells, workspace, observer)
        finally:
            self._ray.shutdown()

    def _connect(self) -> None:
        ray, address = self._ray, os.environ.get("RAY_ADDRESS")
        if not address:
            # A cell computes with one thread; the actor with the round counts needs no core.
            ray.init(address="local", num_cpus=self.workers, include_dashboard=False, log_to_driver=False)
            return
        try:
            ray.init(address=address, log_to_driver=False)
        except (ConnectionError, ray.exceptions.RayError) as error:
            # Ray reports a rejected token as a failed connection; newer releases mention it in the cause's text.
            if "AuthenticationError" in f"{error!r} {error.__cause__}":
                raise DistransError(
                    f"The Ray cluster at {address} needs a token.", next_step=_HOW_TO_SIGN_IN
                ) from error
            raise DistransError(
                f"Could not connect to the Ray cluster at {address}.",
                next_step=f"Check that it is running. If it needs a token: {_HOW_TO_SIGN_IN}",
            ) from error

    def _run(self, cells: Sequence[Cell], workspace: Workspace, observer: CellObserver) -> None:
        ray = self._ray
        counts = self._start_counts()
        task = ray.remote(num_cpus=1, max_retries=0)(_task)  # retried below, with one limit for all causes
        waiting, attempts = list(cells)[::-1], Counter[str]()
        running: dict[Any, Cell] = {}
        shown: dict[str, int] = {}
        while waiting or running:
            while waiting and len(running) < self.workers:
                cell = waiting.pop()
                attempts[cell.id] += 1
                running[task.remote(encode_job(cell, workspace), counts)] = cell
            done, _ = ray.wait(list(running), timeout=_POLL_S)
            self._show(counts, running.values(), shown, observer)
            for reference in done:
                cell = running.pop(reference)
                outcome = self._outcome(reference, attempts[cell.id])
                if outcome is None:
                    waiting.append(cell)
                else:
                    notify(observer, cell, outcome)

    def _start_counts(self) -> Any:
        """Start the actor on this program's node, so that it survives the loss of a worker node."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(self._ray.get_runtime_context().get_node_id(), soft=False)
        actor = self._ray.remote(num_cpus=0, max_restarts=-1)(RoundCounts)
        return actor.options(scheduling_strategy=here).remote()

    def _show(self, counts: Any, cells: Iterable[Cell], shown: dict[str, int], observer: CellObserver) -> None:
        try:
            done = self._ray.get(counts.read.remote(), timeout=_POLL_S)
        except self._ray.exceptions.RayError:
            return  # the actor was lost and is being restarted
        for cell in cells:
            if cell.id in done and shown.get(cell.id) != done[cell.id]:
                shown[cell.id] = done[cell.id]
                observer.on_round(cell, done[cell.id])

    def _outcome(self, reference: Any, attempts: int) -> dict[str, Any] | None:
        """Return the task's outcome, or why it failed; None if it was lost and should run again."""
        errors = self._ray.exceptions
        lost = (
            errors.LocalRayletDiedError,
            errors.NodeDiedError,
            errors.ObjectLostError,
            errors.OutOfMemoryError,
            errors.WorkerCrashedError,
        )
        try:
            outcome: dict[str, Any] = json.loads(self._ray.get(reference))
        except errors.RayError as error:
            if isinstance(error, lost) and attempts < _ATTEMPTS:
                return None
            reason = f"The Ray task failed, attempt {attempts}: {str(error).splitlines()[0]}"
            return {"reason": reason, "details": str(error)}
        return outcome
