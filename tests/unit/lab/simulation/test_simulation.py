from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.simulating import evaluate_all, evaluate_clients, run_all
from support.tensor_data import TensorData, load_digits, share_out
from support.tensors import assert_same_tensors
from torch import Tensor

from lab.datasets.splitters import classes_per_client, paper_shares
from lab.simulation.controls import score
from lab.simulation.simulation import SimulatedClient, Simulation
from shared.contract.measurements import Evaluation
from shared.contract.plan import FederationPlan, ImagePlan, validate_plan
from shared.learning.evaluation import evaluate
from shared.learning.heterogeneity import distributional_heterogeneity
from shared.learning.methods import client_half
from shared.learning.model import build_double

CLASSES, CLIENTS = 8, 4
CHANCE = 1 / CLASSES
IMAGE = ImagePlan(channels=1, height=16, width=16)
Tensors = dict[str, Tensor]
Split = tuple[TensorData, TensorData]


def plan_with(seed: int = 0, rounds: int = 2, preset: str = "paper", **method: Any) -> FederationPlan:
    if method.get("name") != "fedavg":
        method.setdefault("generator", {"hidden": 32, "width": 64})
    return validate_plan(
        {
            "name": "digits",
            "preset": preset,
            "classes": [str(digit) for digit in range(CLASSES)],
            "seed": seed,
            "image": IMAGE.model_dump(),
            "model": {"activation": "relu"},
            "method": {"name": "distrans", **method},
            "training": {"lr": 0.1, "batch_size": 16},
            "rounds": {"count": rounds},
        }
    )


@pytest.fixture(scope="module")
def digits() -> Split:
    """The digits 0 … 7, which four clients can share evenly: training and test images."""
    train, test = load_digits(IMAGE)
    return _first_classes(train), _first_classes(test)


def _first_classes(data: TensorData) -> TensorData:
    kept = data.labels < CLASSES
    return TensorData(data.images[kept], data.labels[kept])


def sites(digits: Split, dh: float) -> list[SimulatedClient]:
    shares = paper_shares(CLASSES, CLIENTS, classes_per_client(dh, CLASSES, CLIENTS), seed=0)
    return share_out(*digits, shares, seed=0)


def small_sites(digits: Split, dh: float) -> list[SimulatedClient]:
    """The same sites, each with only a few batches."""
    return [
        SimulatedClient(site.record, TensorData(site.train.images[::6], site.train.labels[::6]), site.test)
        for site in sites(digits, dh)
    ]


def finished(plan: FederationPlan, clients: Sequence[SimulatedClient]) -> Simulation:
    simulation = Simulation(plan, clients)
    run_all(simulation)
    assert simulation.round == plan.rounds.count
    return simulation


def pooled_accuracy(simulation: Simulation) -> float:
    accuracy = evaluate_all(simulation).accuracy
    assert accuracy is not None
    return accuracy


def everything(simulation: Simulation) -> Tensors:
    """All tensors of a federation, at the coordinator and at the clients."""
    kept = {f"{c.record.id} {name}": value for c in simulation.clients for name, value in c.private.items()}
    return {**simulation.state.shared, **simulation.state.private, **kept}


# Each aggregation at a DH for which the paper uses it, or does not; DH 0, 50 and 100 %.
@pytest.mark.parametrize(
    ("aggregation", "dh", "in_force"),
    [("none", 1.0, "none"), ("mean", 0.5, "mean"), ("network", 0.0, "network"), ("auto", 0.5, "none")],
)
@pytest.mark.parametrize("preset", ["paper", "learned-offset"])
def test_federation_learns_the_digits(preset: str, aggregation: str, dh: float, in_force: str, digits: Split) -> None:
    clients = sites(digits, dh)
    assert distributional_heterogeneity([client.record.class_counts for client in clients]) == dh
    simulation = Simulation(plan_with(rounds=5, preset=preset, offset_aggregation=aggregation), clients)
    outcomes = run_all(simulation)
    first, last = outcomes[0], outcomes[-1]
    assert (len(outcomes), last.facts["offset_aggregation"]) == (5, in_force)
    assert pooled_accuracy(simulation) > 5 * CHANCE
    evaluations = evaluate_clients(simulation)
    for client in clients:
        name = client.record.id
        assert last.reports[name].loss < first.reports[name].loss
        accuracy, motion = evaluations[name].accuracy, last.reports[name].offset_motion
        assert accuracy is not None
        assert accuracy > 3 * CHANCE
        assert motion is not None
        if preset == "learned-offset":
            assert motion > 0.5
        elif in_force == "none":
            assert 0 < motion < 1e-3


def test_fedavg_learns_the_digits(digits: Split) -> None:
    simulation = finished(plan_with(rounds=5, name="fedavg"), sites(digits, dh=0.5))
    assert pooled_accuracy(simulation) > 5 * CHANCE
    assert all(client.private == {} for client in simulation.clients)


PLANS: dict[str, dict[str, Any]] = {
    "none": {"offset_aggregation": "none"},
    "mean": {"offset_aggregation": "mean"},
    "network": {"offset_aggregation": "network"},
    "network that sees offsets": {
        "offset_aggregation": "network",
        "generator": {"inputs": "embedding+offset", "optimizer": "adam", "width": 32, "hidden": 16},
    },
    "fedavg": {"name": "fedavg"},
}


@pytest.mark.parametrize("method", PLANS.values(), ids=PLANS.keys())
def test_same_seed_gives_the_same_bits_and_another_seed_others(method: dict[str, Any], digits: Split) -> None:
    def run(seed: int) -> Simulation:
        torch.rand(seed + 1)  # other code that draws random numbers
        options = method if "name" in method else {"offset_optimizer": "adam", **method}
        return finished(plan_with(seed, **options), small_sites(digits, dh=0.5))

    one, same, other = run(1), run(1), run(2)
    assert_same_tensors(everything(one), everything(same))
    assert evaluate_clients(one) == evaluate_clients(same)
    found, others = everything(one), everything(other)
    drawn = [name for name in found if name.endswith(("weight", "offset")) and "optimizer.step:" not in name]
    assert drawn
    assert not any(torch.equal(found[name], others[name]) for name in drawn)


def test_order_of_clients_does_not_change_a_bit(digits: Split) -> None:
    plan = plan_with(preset="learned-offset", offset_aggregation="network")
    clients = small_sites(digits, dh=0.5)
    reversed_clients = small_sites(digits, dh=0.5)[::-1]
    assert_same_tensors(everything(finished(plan, clients)), everything(finished(plan, reversed_clients)))


def test_mean_aggregation_gives_every_client_the_same_offset(digits: Split) -> None:
    simulation = finished(plan_with(offset_aggregation="mean", preset="learned-offset"), small_sites(digits, dh=0.5))
    first, *others = (simulation.task(client).personal for client in simulation.clients)
    for other in others:
        assert_same_tensors(other, first)
    mean = torch.stack([client.private["offset"] for client in simulation.clients]).double().mean(dim=0).float()
    torch.testing.assert_close(first["offset"], mean)


def test_at_alpha_zero_distrans_starts_as_fedavg_with_summed_heads_but_trains_differently(digits: Split) -> None:
    plan = plan_with(rounds=1, alpha=0.0, offset_aggregation="none")
    double = Simulation(plan, small_sites(digits, dh=0.5))
    summed = dict(double.state.shared)
    left, right = build_double(plan, 0.0).logits.weight.detach().chunk(2, dim=1)
    summed["logits.weight"] = left + right
    single = Simulation(plan_with(rounds=1, name="fedavg"), small_sites(digits, dh=0.5), pretrained=summed)
    images = digits[1].images[:50]

    def logits(simulation: Simulation) -> Tensor:
        client = simulation.clients[0]
        return simulation.client.predictor(simulation.task(client), client.private, simulation.runtime)(images)

    torch.testing.assert_close(logits(double), logits(single), rtol=1e-4, atol=1e-5)
    double.run_round()
    single.run_round()
    assert not torch.allclose(logits(double), logits(single), rtol=1e-2, atol=1e-2)


def test_at_alpha_zero_offsets_make_no_difference(digits: Split) -> None:
    one, other = (
        finished(plan_with(rounds=1, alpha=0.0, offset_aggregation="none", offset_init=init), small_sites(digits, 0.5))
        for init in ("uniform", "normal")
    )
    for name, value in one.state.shared.items():
        torch.testing.assert_close(other.state.shared[name], value)


def test_client_predicts_differently_and_worse_with_another_clients_offset(digits: Split) -> None:
    plan = plan_with(rounds=5, preset="learned-offset", offset_aggregation="none")
    simulation = finished(plan, sites(digits, dh=1.0))
    half, clients = client_half(plan), simulation.clients
    own, foreign = Evaluation(samples=0, correct=0, loss_sum=0.0), Evaluation(samples=0, correct=0, loss_sum=0.0)
    for client, neighbor in zip(clients, [*clients[1:], clients[0]], strict=True):
        task, images = simulation.task(client), client.test.images
        with_own = half.predictor(task, client.private, simulation.runtime)
        with_foreign = half.predictor(task, neighbor.private, simulation.runtime)
        assert not torch.allclose(with_own(images), with_foreign(images), atol=0.1)
        own += evaluate(with_own, client.test.batches(100, 0), client.own_classes)
        foreign += evaluate(with_foreign, client.test.batches(100, 0), client.own_classes)
    assert own.correct > foreign.correct


def test_round_reports_what_each_client_did(digits: Split) -> None:
    clients = small_sites(digits, dh=0.5)
    simulation = Simulation(plan_with(rounds=3, offset_aggregation="none"), clients)
    outcome = simulation.run_round()
    evaluations = evaluate_clients(simulation)
    names = {client.record.id for client in clients}
    assert (outcome.round, outcome.reports.keys(), evaluations.keys()) == (1, names, names)
    for client in clients:
        report, evaluation = outcome.reports[client.record.id], evaluations[client.record.id]
        assert report.samples == client.train.samples
        assert evaluation.samples == client.test.samples
        assert evaluation.negatives == 0  # a client's test images are of its own classes
    assert evaluate_all(simulation).samples == sum(client.test.samples for client in clients)
    assert [later.round for later in run_all(simulation)] == [2, 3]


def test_site_without_test_images_has_no_accuracy(digits: Split) -> None:
    clients = small_sites(digits, dh=0.5)
    clients[0].test = TensorData(clients[0].test.images[:0], clients[0].test.labels[:0])
    simulation = Simulation(plan_with(offset_aggregation="none"), clients)
    simulation.run_round()
    assert score(simulation)[clients[0].record.id].plain.accuracy is None
    assert evaluate_all(simulation).samples == sum(client.test.samples for client in clients)


def test_sites_hold_disjoint_images_of_the_same_classes_for_training_and_testing(digits: Split) -> None:
    clients = sites(digits, dh=0.5)
    assert len({client.record.id for client in clients}) == CLIENTS
    for client in clients:
        assert len(client.own_classes) == 4
        assert set(client.train.labels.tolist()) == set(client.test.labels.tolist()) == client.own_classes
        assert client.record.class_counts == tuple(torch.bincount(client.train.labels, minlength=CLASSES).tolist())
    seen = torch.cat([client.train.images for client in clients]).flatten(1)
    whole = digits[0].images.flatten(1)
    assert len(seen.unique(dim=0)) <= len(whole.unique(dim=0))
    assert len(whole) - CLASSES * CLIENTS <= len(seen) <= len(whole)
