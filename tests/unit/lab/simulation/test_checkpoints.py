"""Checkpoints of a simulation."""

import json
from pathlib import Path

import pytest
from support.few_digits import assert_same, plan_of, sites
from support.simulating import evaluate_clients

from lab.simulation.simulation import Checkpoint, CheckpointBroken, Simulation
from shared.learning.methods import METHODS


@pytest.mark.parametrize("method", list(METHODS))
def test_resumed_simulation_has_the_same_bits(method: str, tmp_path: Path) -> None:
    plan = plan_of(method)
    shape = (1, 10) if method == "fedaws" else (4, 5)  # FedAwS is for clients with one class
    straight = Simulation(plan, sites(*shape))
    for _ in range(4):
        straight.run_round()
    stopped = Simulation(plan, sites(*shape))
    for number in range(2):
        stopped.run_round()
        Checkpoint(tmp_path).save(stopped, {"curve": [number]})
    resumed = Simulation(plan, sites(*shape))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.restore(resumed) == {"curve": [1]}
    assert_same(resumed, stopped)
    for _ in range(2):
        resumed.run_round()
        checkpoint.save(resumed)
    assert_same(resumed, straight)
    assert evaluate_clients(resumed) == evaluate_clients(straight)
    named = json.loads((tmp_path / "checkpoint.json").read_text())
    files = {file.name for file in tmp_path.glob("*.safetensors")}
    assert files == {named["server"], *named["clients"].values()}


def test_only_changed_tensors_are_written_again(tmp_path: Path) -> None:
    simulation, checkpoint = Simulation(plan_of(), sites()), Checkpoint(tmp_path)
    simulation.run_round()
    checkpoint.save(simulation)
    first = {file.name for file in tmp_path.glob("site-*")}
    assert len(first) == 3
    trained = {client.record.id for client in simulation.participants()}
    simulation.run_round()
    checkpoint.save(simulation)
    kept = {file.name for file in tmp_path.glob("site-*-1.safetensors")}
    assert kept == {name for name in first if name.removesuffix("-1.safetensors") not in trained}


def test_missing_checkpoint_is_none_and_a_broken_or_foreign_one_is_an_error(tmp_path: Path) -> None:
    simulation = Simulation(plan_of(), sites())
    assert Checkpoint(tmp_path / "none").restore(simulation) is None
    Checkpoint(tmp_path).save(simulation)
    with pytest.raises(CheckpointBroken, match="belongs to another simulation"):
        Checkpoint(tmp_path).restore(Simulation(plan_of(model={"dense_dim": 7}), sites()))
    whole = json.loads((tmp_path / "checkpoint.json").read_text())
    for name in whole:
        (tmp_path / "checkpoint.json").write_text(json.dumps({key: whole[key] for key in whole if key != name}))
        assert not Checkpoint(tmp_path).exists()
        with pytest.raises(CheckpointBroken, match=f"is unusable: .*{name}"):
            Checkpoint(tmp_path).restore(simulation)
    (tmp_path / "checkpoint.json").write_text(json.dumps(whole))
    assert Checkpoint(tmp_path).exists()
    (tmp_path / "server-0.safetensors").write_bytes(b"12345678")
    with pytest.raises(CheckpointBroken, match="is unusable"):
        Checkpoint(tmp_path).restore(simulation)
