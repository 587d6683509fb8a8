"""Ray clusters that lose a node or require a token; test_engines.py has one that does neither."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.experiments import ray_engine
from lab.experiments.cells import Cell, Workspace, run_cell
from lab.experiments.experiment import Experiment
from lab.experiments.ray_engine import RayEngine
from shared.contract.errors import DistransError

ray = pytest.importorskip("ray", exc_type=ImportError) if os.environ.get("CI") != "true" else __import__("ray")
ROOT = Path(__file__).resolve().parents[4]
(CELL,) = Experiment.model_validate(
    {
        "name": "try",
        "title": "A try",
        "rounds": 2,
        "seeds": [0],
        "plan": {"model": {"activation": "relu"}},
        "data": [{"name": "digits", "train_per_class": 8, "test_per_class": 4, "clients": [10], "dh": [1.0]}],
        "methods": [{"label": "DisTrans", "method": {"name": "distrans"}}],
    }
).cells("full")
pytestmark = pytest.mark.filterwarnings(  # Ray's
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster whose head runs no cells."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 200, "health_check_failure_threshold": 3}
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": quick}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    cluster.shutdown()


class LosingNodes(RayEngine):
    """Has one node for cells; when its cell reports, kills the node and the actor and adds another node."""

    def __init__(self, cluster: Any) -> None:
        super().__init__(workers=1)
        self.cluster = cluster
        self.attempts: list[int] = []

    def _connect(self) -> None:
        super()._connect()
        self.first: Any = self.cluster.add_node(num_cpus=1)

    def _start_counts(self) -> Any:
        self.counts = super()._start_counts()
        place = ray.get(self.counts.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))
        assert place == ray.get_runtime_context().get_node_id()
        return self.counts

    def _outcome(self, reference: Any, attempts: int) -> dict[str, Any] | None:
        self.attempts.append(attempts)
        outcome = super()._outcome(reference, attempts)
        if outcome is None:  # as in the last attempt
            last = super()._outcome(reference, ray_engine._ATTEMPTS)
            assert last is not None
            assert last["reason"].startswith("The Ray task failed, attempt 4: ")
        return outcome

    def on_round(self, cell: Cell, _done: int) -> None:
        assert cell == CELL
        if self.first is not None:
            self.cluster.add_node(num_cpus=1)
            self.cluster.remove_node(self.first, allow_graceful=False)
            ray.kill(self.counts, no_restart=False)
            self.first = None

    def on_finished(self, _cell: Cell, result: dict[str, Any]) -> None:
        self.result = result

    def on_failed(self, _cell: Cell, reason: str, _details: str) -> None:
        pytest.fail(reason)


def test_lost_node_costs_its_cells_only_another_attempt(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, cell_id = tmp_path / "started", CELL.id

    def task(job: str, counts: Any) -> str:  # nested, so that Ray sends its code
        import signal

        if not started.exists():
            started.touch()
            counts.report.remote(cell_id, 0)
            signal.pause()  # until its node is lost
        from lab.experiments.ray_engine import _task

        return _task(job, counts)

    monkeypatch.setattr(ray_engine, "_task", task)
    workspace = Workspace(tmp_path / "data", tmp_path / "checkpoints")
    engine = LosingNodes(cluster)
    engine([CELL], workspace, engine)
    assert engine.attempts == [1, 2]
    assert {**engine.result, "seconds": 0} == {**run_cell(CELL, workspace), "seconds": 0}


@pytest.fixture
def guarded_address() -> Iterator[str]:
    """The address of a cluster that requires a token."""
    program = (
        "from ray.cluster_utils import Cluster; cluster = Cluster(initialize_head=True, "
        "head_node_args={'num_cpus': 0, 'include_dashboard': False}); "
        "print('at', cluster.address, flush=True); input(); cluster.shutdown()"
    )
    head = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4},
    )
    assert head.stdout is not None
    yield next(line.split()[1] for line in head.stdout if line.startswith("at "))
    head.communicate("\n")


def test_missing_token_error_says_what_to_set(
    guarded_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", guarded_address)
    monkeypatch.setattr(ray._private.ray_constants, "NUM_REDIS_GET_RETRIES", 1)
    with pytest.raises(DistransError) as raised:
        RayEngine(1)([CELL], Workspace(tmp_path, tmp_path), None)  # type: ignore[arg-type]
    assert f"the ray cluster at {guarded_address}" in raised.value.message.lower()
    assert "needs a token" in str(raised.value)
    assert "Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH=FILE" in str(raised.value)
