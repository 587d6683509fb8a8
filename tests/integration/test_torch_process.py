"""Whole federations on a coordinator process that never loads torch."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.coordinator import CoordinatorProcess, Site, running
from support.halves import server_half
from support.plans import report as report_of
from support.plans import small_plan, update_tensors
from support.tensors import assert_same_tensors
from support.waiting import eventually

from shared.contract.plan import FederationPlan
from shared.learning.methods import METHODS
from shared.learning.methods.base import ClientRecord, RoundContext
from shared.learning.methods.tensor_half import TensorState
from shared.tensors.mean import RunningMean
from shared.tensors.names import PERSONAL, SHARED, strip_prefix
from shared.tensors.wire import encode

PROC = Path("/proc")
NAMES = ("north", "south")
COUNTS = {"cat": 3, "dog": 1}
ROUNDS = 2
NETWORK = {"offset_aggregation": "network", "generator": {"width": 8, "hidden": 8}}
SMALL: Mapping[str, dict[str, Any]] = {
    "pfedhn": {"hidden": 8, "hidden_layers": 1},
    "pfedhn-pc": {"hidden": 8, "hidden_layers": 1},
    "pfedme": {"server_mix": 0.5},
    "moon": {"server_momentum": 0.5},
}
# More than the interpreter with the web framework and the database takes, far less than torch alone.
MEMORY_BYTES = 200 * 1024 * 1024


def libraries(pid: int) -> set[str]:
    return {Path(line.split()[-1]).name for line in (PROC / str(pid) / "maps").read_text().splitlines()}


def memory_bytes(pid: int) -> int:
    (line,) = [line for line in (PROC / str(pid) / "status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def children(pid: int) -> list[int]:
    return [int(child) for file in (PROC / str(pid) / "task").glob("*/children") for child in file.read_text().split()]


class Federation:
    """A federation of two sites that upload random updates, next to the same one in this process."""

    def __init__(self, coordinator: CoordinatorProcess, plan: FederationPlan) -> None:
        coordinator.create(plan)
        self.plan, self.half = plan, server_half(plan)
        self.sites = [coordinator.join(plan, name, COUNTS) for name in NAMES]
        roster = [ClientRecord(name, tuple(COUNTS.values())) for name in NAMES]
        self.round = RoundContext(roster, self.half.facts(roster))
        self.state: TensorState = self.half.initial_state()

    def run_round(self, number: int) -> None:
        """Run a round and compare what the sites download, before and after."""
        self.check_personal(number)
        mean, uploads = RunningMean(), []
        for seed, (site, client) in enumerate(zip(self.sites, self.round.roster, strict=True)):
            update = update_tensors(self.plan, self.round.facts, 10 * number + seed)
            body = encode(update, {"report": report_of().model_dump_json()})
            assert site.put(self.round_id(site, number), body).status_code == 200
            mean.add(strip_prefix(update, SHARED))
            uploads.append((client, strip_prefix(update, PERSONAL)))
        self.state = self.half.finish(self.state, mean.result(), uploads, self.round)
        self.sites[0].wait_for_model(number)
        model = self.sites[0].tensors(f"/v1/federations/{self.plan.name}/model?round={number}")
        assert_same_tensors(model, self.state.shared)

    def check_personal(self, number: int) -> None:
        for site, client in zip(self.sites, self.round.roster, strict=True):
            task = site.wait_for_round(number)
            found = site.tensors(task.personal_url) if task.personal_url else {}
            assert_same_tensors(found, self.half.personal(self.state, client, self.round))

    @staticmethod
    def round_id(site: Site, number: int) -> int:
        task = site.wait_for_round(number)
        assert task.round is not None
        return task.round.id


def plan_for(title: str, **method: Any) -> FederationPlan:
    return small_plan(title, method=method, rounds={"count": ROUNDS, "min_clients": 2})


@pytest.mark.skipif(not PROC.exists(), reason="reads Linux's /proc")
def test_a_round_of_the_default_preset_never_loads_torch(tmp_path: Path) -> None:
    plan = small_plan("pets", preset="offset-dropout", rounds={"count": ROUNDS, "min_clients": 2})
    with running(f"sqlite:///{tmp_path / 'coordinator.db'}", tmp_path) as coordinator:
        pid = coordinator.process.pid
        federation = Federation(coordinator, plan)
        eventually(lambda: not children(pid))  # what created the initial weights
        for number in range(1, ROUNDS + 1):
            federation.run_round(number)
            assert not children(pid)
        assert not {name for name in libraries(pid) if "torch" in name}
        assert memory_bytes(pid) < MEMORY_BYTES


@pytest.mark.skipif(not PROC.exists(), reason="reads Linux's /proc")
def test_every_method_gives_the_same_bits_without_torch_in_the_coordinator(tmp_path: Path) -> None:
    plans = [plan_for(name, name=name, **SMALL.get(name, {})) for name in METHODS]
    plans += [plan_for(f"offsets-{kind}", offset_aggregation=kind) for kind in ("none", "mean")]
    plans += [plan_for("offsets-network", **NETWORK), plan_for("offsets-normal", offset_init="normal")]
    with running(f"sqlite:///{tmp_path / 'coordinator.db'}", tmp_path) as coordinator:
        federations = [Federation(coordinator, plan) for plan in plans]
        for number in range(1, ROUNDS + 1):
            for federation in federations:
                federation.run_round(number)
        assert not {name for name in libraries(coordinator.process.pid) if "torch" in name}


@pytest.mark.skipif(not PROC.exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("method", [NETWORK, {"name": "pfedhn", **SMALL["pfedhn"]}], ids=["network", "hypernetwork"])
def test_a_torch_process_killed_in_mid_round_changes_no_bit(tmp_path: Path, method: dict[str, Any]) -> None:
    with running(f"sqlite:///{tmp_path / 'coordinator.db'}", tmp_path) as coordinator:
        pid = coordinator.process.pid
        federation = Federation(coordinator, plan_for("pets", **method))
        for number in range(1, ROUNDS + 1):
            federation.check_personal(number)
            for child in children(pid):
                os.kill(child, signal.SIGKILL)
            federation.run_round(number)
        assert coordinator.show("pets").rounds_done == ROUNDS
