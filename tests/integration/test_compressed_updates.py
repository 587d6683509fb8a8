"""Compressed updates from the upload to the model: at the coordinator, and between real programs."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from support.agents import AgentThread, digits_plan, enroll, write_digits
from support.api import SocketApi, open_api, problem_of
from support.compression import OPTIONS
from support.desk import TINY_NETWORK, Desk, refused
from support.plans import report, small_plan, update_body, update_tensors
from support.tensors import assert_same_tensors

from client_agent.data.dataset import open_data
from client_agent.state.folder import StateFolder
from lab.simulation.simulation import SimulatedClient, Simulation
from server.core.errors import InvalidInput
from server.service import tasks
from server.service.aggregation import LEASE_S
from server.store.database import Database
from shared.contract.plan import FederationPlan, UpdateCompression
from shared.learning.methods import server_half
from shared.learning.methods.base import ClientRecord
from shared.learning.residuals import without_residual
from shared.tensors.arrays import as_arrays
from shared.tensors.mean import RunningMean
from shared.tensors.names import SHARED, Tensors, strip_prefix
from shared.tensors.wire import digest, encode

every_option = pytest.mark.parametrize("option", OPTIONS)


def compressed_plan(option: UpdateCompression = "int8", method: str = "fedavg") -> FederationPlan:
    return small_plan(
        method={"name": method}, training={"update_compression": option}, rounds={"count": 3, "min_clients": 3}
    )


class TestCoordinator:
    @every_option
    def test_averages_the_restored_updates_in_any_order_even_after_a_restart(
        self, clean_db: Database, option: UpdateCompression
    ) -> None:
        desk = Desk(clean_db, compressed_plan(option))
        sites = [desk.join(name) for name in ("east", "north", "west")]
        for number in (1, 2):
            base, half, mean = as_arrays(desk.model(number - 1)), server_half(desk.plan), RunningMean()
            bodies = [desk.body(seed) for seed in range(3)]
            for body in bodies:
                mean.add(half.received(strip_prefix(safetensors.torch.load(body), SHARED), base))
            for place in (range(3), (2, 0, 1))[number - 1]:
                desk.put(sites[place], bodies[place])
                desk.aggregate()
                desk.restart()
                desk.wait(LEASE_S + 1)
            assert desk.bits(number) == digest(encode(mean.result()))

    def test_announces_the_size_of_compressed_updates(self, clean_db: Database) -> None:
        limits = []
        for option in ("none", *OPTIONS):
            desk = Desk(clean_db, compressed_plan(option).model_copy(update={"name": option}))
            sites = [desk.join(name) for name in ("east", "north", "west")]
            task = tasks.task(desk.ctx, sites[0])
            assert task.round is not None
            limits.append(task.round.max_update_bytes)
            assert len(desk.body(0)) <= limits[-1]
        assert limits[0] > limits[1] > limits[2] > limits[3]

    def test_refuses_updates_of_another_form_and_says_what_it_expects(self, sqlite_url: str) -> None:
        plan = compressed_plan()
        with open_api(sqlite_url) as api:
            api.create(plan)
            sites = [api.join(plan, name, {"cat": 5}) for name in ("east", "north", "west")]
            task = sites[0].task()
            assert task.round is not None
            in_full = update_body(compressed_plan("none"), {})
            answer = sites[0].put(task.round.id, in_full)
            assert problem_of(answer) == (422, "invalid-tensors")
            assert "missing: 'shared." in answer.json()["detail"]
            assert ".scales'" in answer.json()["detail"]

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_refuses_scales_that_are_not_finite(self, clean_db: Database, value: float) -> None:
        desk = Desk(clean_db, compressed_plan())
        sites = [desk.join(name) for name in ("east", "north", "west")]
        error = refused(InvalidInput, "invalid-tensors", lambda: desk.put(sites[0], poisoned(desk, value)))
        assert ".scales' contains a value that is not finite" in error.message
        assert desk.view.state == "running"

    @pytest.mark.parametrize("option", ["int8", "int4"])
    def test_absurd_scales_never_make_a_model_that_is_not_finite(
        self, clean_db: Database, option: UpdateCompression
    ) -> None:
        desk = Desk(clean_db, compressed_plan(option))
        sites = [desk.join(name) for name in ("east", "north", "west")]
        desk.put(sites[0], poisoned(desk, 3.4e38))
        desk.put(sites[1], poisoned(desk, -3.4e38))
        desk.upload(sites[2], 1)
        desk.aggregate()
        assert desk.view.rounds_done == 1
        assert all(bool(value.isfinite().all()) for value in desk.model(1).values())

    def test_blames_a_poisoned_update_by_its_restored_values(self, clean_db: Database) -> None:
        plan = small_plan(
            method=TINY_NETWORK, training={"update_compression": "int8"}, rounds={"count": 3, "min_clients": 2}
        )
        desk = Desk(clean_db, plan)
        good, bad = desk.join("good", cat=5), desk.join("bad", dog=5)
        desk.run_round({good: 1, bad: 2})
        desk.upload(good, 3)
        offset = {"personal.offset": torch.full(plan.image.shape, 3e38)}
        desk.put(bad, poisoned(desk, 1e30, offset))
        desk.aggregate()
        assert desk.view.state == "paused"
        assert "the update from 'bad' has values up to 3e+38 in 'personal.offset'" in desk.view.reason


def poisoned(desk: Desk, scale: float, others: Tensors | None = None) -> bytes:
    """Return an update for the open round with this scale everywhere."""
    tensors = update_tensors(desk.plan, {"offset_aggregation": "network"}, 3) | (others or {})
    for name, value in tensors.items():
        if name.endswith(".scales"):
            tensors[name] = torch.full_like(value, scale)
        elif value.dtype in (torch.int8, torch.uint8):
            tensors[name] = torch.full_like(value, 127)
    return encode(tensors, {"report": report().model_dump_json()})


def simulated(plan: FederationPlan, state: StateFolder) -> Simulation:
    data = open_data(state.identity().data, plan)
    record = ClientRecord("north", tuple(data.report.class_counts.values()))
    return Simulation(plan, [SimulatedClient(record, data.train, data.test)])


def test_after_a_rollback_an_agent_drops_its_residual(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It belongs to updates that the model no longer contains; the bits are those of a simulation that drops it."""
    monkeypatch.setattr("client_agent.coordinator.client.LONG_POLL_S", 1.0)
    plan = digits_plan("rolled-back", rounds=3, clients=1, update_compression="int8")
    with SocketApi(sqlite_url) as api:
        api.create(plan)
        data = write_digits(tmp_path / "data", ("0", "1"), every=4)
        state = enroll(api, plan, "north", data, tmp_path, api.url)
        with AgentThread(state, alone=False, adapt="off") as agent:
            agent.wait()
        assert state.kept().keys() - state.private().keys()
        api.admin("POST", f"/v1/federations/{plan.name}/rollback", json={"to": 1})
        api.admin("POST", f"/v1/federations/{plan.name}/resume")
        with AgentThread(state, alone=False, adapt="off") as agent:
            agent.wait()
    simulation = simulated(plan, state)
    (client,) = simulation.clients
    simulation.run_round()
    first = simulation.state
    simulation.run_round()
    simulation.run_round()
    simulation.state, simulation.round = first, 4  # the rollback took number 4
    client.private = without_residual(client.private)
    simulation.run_round()
    simulation.run_round()
    assert state.models.numbers()[-1] == 6
    assert_same_tensors(state.models.load_number(6).shared, simulation.state.shared)
    assert_same_tensors(state.kept(), client.private)
