"""What is evaluated after the last round."""

from dataclasses import replace

import pytest
import torch
from support.few_digits import plan_of, sites
from support.simulating import evaluate_all, run_all

from client_agent.serving.candidates import BLEND
from lab.datasets.clients import foreign_images
from lab.simulation.alone import AloneSimulation
from lab.simulation.controls import Scores, score
from lab.simulation.final import ADAPTATION_EPOCHS, Counts, fine_tuned, foreign_classes, served
from lab.simulation.simulation import Simulation
from shared.contract.errors import DistransError
from shared.learning.methods.base import RoundTask, TrainingContext

ROUNDS = {"count": 6}


@pytest.fixture(scope="module")
def trained() -> Simulation:
    """A federation with offsets after its last round."""
    simulation = Simulation(plan_of(rounds=ROUNDS), sites())
    run_all(simulation)
    return simulation


@pytest.fixture(scope="module")
def alone() -> AloneSimulation:
    simulation = AloneSimulation(plan_of(rounds=ROUNDS), sites())
    run_all(simulation)
    return simulation


class TestFineTuning:
    def test_is_plain_training_of_the_final_model_at_each_client(self) -> None:
        simulation = Simulation(plan_of("fedavg", rounds=ROUNDS), sites())
        run_all(simulation)
        longer = simulation.plan.training.model_copy(update={"epochs": ADAPTATION_EPOCHS})
        half = type(simulation.client)(simulation.plan.model_copy(update={"training": longer}))
        correct = 0
        for client in simulation.clients:
            task = simulation.task(client)
            update, _ = half.train(task, {}, TrainingContext(client.train))
            predictor = half.predictor(replace(task, shared=update.shared), {}, simulation.runtime)
            correct += sum(int((predictor(x).argmax(dim=1) == y).sum()) for x, y in client.test.batches(64, seed=0))
        assert fine_tuned(simulation) == Counts(evaluate_all(simulation).samples, correct)

    def test_leaves_the_federation_as_it_is(self, trained: Simulation) -> None:
        before = score(trained)
        fine_tuned(trained)
        assert score(trained) == before

    def test_needs_a_single_network(self, monkeypatch: pytest.MonkeyPatch, trained: Simulation) -> None:
        def none(_task: RoundTask, *_: object, **__: object) -> object:
            return lambda images: images

        monkeypatch.setattr(trained.client, "predictor", none)
        with pytest.raises(DistransError, match="distrans has no single network to fine-tune"):
            fine_tuned(trained)


class TestServed:
    def test_members_agree_with_the_other_evaluations(self, trained: Simulation, alone: AloneSimulation) -> None:
        found = served(trained, alone).counts
        pooled = sum(score(trained).values(), Scores())
        assert found["offset"] == Counts(pooled.plain.samples, pooled.plain.correct)
        assert found["offset+prior"].correct == pooled.reweighted.correct
        assert found["alone"].correct == evaluate_all(alone).correct
        assert found.keys() == {
            *("global", "offset", "adapted", "alone"),
            *("global+prior", "offset+prior", "adapted+prior", "served"),
        }
        assert {counted.samples for counted in found.values()} == {pooled.plain.samples}

    def test_every_client_with_test_images_makes_a_choice(self, trained: Simulation, alone: AloneSimulation) -> None:
        choices = served(trained, alone).choices
        assert choices.keys() == {client.record.id for client in trained.clients}
        for choice in choices.values():
            assert min(choice["weights"].values()) > 0
            if choice["candidate"] != BLEND:
                assert sum(choice["weights"].values()) == pytest.approx(1, abs=1e-3)

    def test_clients_without_test_images_are_left_out(self, trained: Simulation, alone: AloneSimulation) -> None:
        first = trained.clients[0]
        kept, nothing = first.test, replace(first.test, indices=torch.empty(0, dtype=torch.int64))
        first.test = nothing
        try:
            assert first.record.id not in served(trained, alone).choices
        finally:
            first.test = kept


class TestForeignClasses:
    def test_images_are_of_other_classes_and_look_like_the_clients(self) -> None:
        for client in sites():
            few, all_of_them = (foreign_images(client, limit, seed=0) for limit in (5, 1000))
            assert few.samples == 5
            assert all_of_them.samples == 6 * 8
            assert not set(all_of_them.labels.tolist()) & client.own_classes
            assert (few.shift, few.client) == (client.test.shift, client.test.client)

    def test_are_counted_with_and_without_the_offset(self, trained: Simulation) -> None:
        counts = foreign_classes(trained)
        assert counts.keys() == {"foreign", "foreign_without_offset"}
        assert {counted.samples for counted in counts.values()} == {5 * 6 * 8}
        assert counts["foreign"] != counts["foreign_without_offset"]

    def test_without_offsets_or_other_classes_there_is_less_to_count(self, alone: AloneSimulation) -> None:
        assert foreign_classes(alone) == {"foreign": Counts(5 * 6 * 8, 0)}
        assert foreign_classes(Simulation(plan_of("fedavg"), sites(10))) == {"foreign": Counts(0, 0)}


def test_diverged_models_are_not_counted() -> None:
    with pytest.raises(DistransError, match="diverged"):
        Counts.of(torch.tensor([[float("nan"), 0.0]]), torch.tensor([0]))
