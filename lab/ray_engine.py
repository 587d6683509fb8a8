"""Cells as tasks of a Ray cluster: the one that RAY_ADDRESS names, else a new one on this machine.

On a cluster the data root and the results folder must be the same folders on every node. A cell whose node or process
is lost runs again from its last checkpoint, on whichever node has room.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from lab.cells import Cell, Workspace
from lab.engines import Listener, attempt, decode_job, encode_job, tell
from lab.round_counts import RoundCounts
from shared.problems import DistransError

_POLL_S = 0.5
_ATTEMPTS = 4  # per cell; one that takes its process down each time must end
_HOW_TO_SIGN_IN = (
    "Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE with the cluster's token; "
    "`ray get-auth-token` prints it on a node of the cluster."
)


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
        self._connect()
        try:
            self._run(cells, workspace, listener)
        finally:
            self._ray.shutdown()

    def _connect(self) -> None:
        ray, address = self._ray, os.environ.get("RAY_ADDRESS")
        if not address:
            # A cell computes with one thread; the counts' actor takes no core.
            ray.init(address="local", num_cpus=self.workers, include_dashboard=False, log_to_driver=False)
            return
        try:
            ray.init(address=address, log_to_driver=False)
        except (ConnectionError, ray.exceptions.RayError) as error:
            # Ray reports a refused token as a failed connection; newer releases name it in a text inside the cause.
            if "AuthenticationError" in f"{error!r} {error.__cause__}":
                raise DistransError(
                    f"The Ray cluster at {address} needs a token.", next_step=_HOW_TO_SIGN_IN
                ) from error
            raise DistransError(
                f"Could not connect to the Ray cluster at {address}.",
                next_step=f"Check that it is running. If it needs a token: {_HOW_TO_SIGN_IN}",
            ) from error

    def _run(self, cells: Sequence[Cell], workspace: Workspace, listener: Listener) -> None:
        ray = self._ray
        counts = self._start_counts()
        task = ray.remote(num_cpus=1, max_retries=0)(_task)  # repeated here, where every cause has the same bound
        waiting, attempts = list(cells)[::-1], Counter[str]()
        running: dict[Any, Cell] = {}
        shown: dict[str, int] = {}
        while waiting or running:
            while waiting and len(running) < self.workers:
                cell = waiting.pop()
                attempts[cell.id] += 1
                running[task.remote(encode_job(cell, workspace), counts)] = cell
            done, _ = ray.wait(list(running), timeout=_POLL_S)
            self._show(counts, running.values(), shown, listener)
            for reference in done:
                cell = running.pop(reference)
                answer = self._answer(reference, attempts[cell.id])
                if answer is None:
                    waiting.append(cell)
                else:
                    tell(listener, cell, answer)

    def _start_counts(self) -> Any:
        """The actor, on this program's node: it should not end with a node that only computes."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(self._ray.get_runtime_context().get_node_id(), soft=False)
        actor = self._ray.remote(num_cpus=0, max_restarts=-1)(RoundCounts)
        return actor.options(scheduling_strategy=here).remote()

    def _show(self, counts: Any, cells: Iterable[Cell], shown: dict[str, int], listener: Listener) -> None:
        try:
            done = self._ray.get(counts.read.remote(), timeout=_POLL_S)
        except self._ray.exceptions.RayError:
            return  # it was lost and is being restarted
        for cell in cells:
            if cell.id in done and shown.get(cell.id) != done[cell.id]:
                shown[cell.id] = done[cell.id]
                listener.on_round(cell, done[cell.id])

    def _answer(self, reference: Any, attempts: int) -> dict[str, Any] | None:
        """What the task returned, or why it ended; None if it was lost and may run again."""
        errors = self._ray.exceptions
        lost = (
            errors.LocalRayletDiedError,
            errors.NodeDiedError,
            errors.ObjectLostError,
            errors.OutOfMemoryError,
            errors.WorkerCrashedError,
        )
        try:
            answer: dict[str, Any] = json.loads(self._ray.get(reference))
        except errors.RayError as error:
            if isinstance(error, lost) and attempts < _ATTEMPTS:
                return None
            reason = f"The Ray task ended, attempt {attempts}: {str(error).splitlines()[0]}"
            return {"reason": reason, "details": str(error)}
        return answer
