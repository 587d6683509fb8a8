"""A whole federation over real HTTP, on both databases."""

from pathlib import Path

from support.coordinator import running
from support.simulating import run_all
from support.tensor_data import load_digits, share_out

from lab.datasets.digits import CLASSES as DIGIT_CLASSES
from lab.datasets.splitters import paper_shares
from lab.simulation.simulation import SimulatedClient, Simulation
from shared.contract.plan import FederationPlan, validate_plan
from shared.learning.evaluation import evaluate
from shared.learning.methods import client_half
from shared.learning.methods.base import RoundTask, TrainingContext
from shared.learning.runtime import Runtime
from shared.tensors.wire import digest, encode


def network_plan() -> FederationPlan:
    return validate_plan(
        {
            "name": "digits",
            "classes": DIGIT_CLASSES[:6],
            "image": {"channels": 1, "height": 16, "width": 16},
            "model": {"activation": "relu"},
            "method": {
                "name": "distrans",
                "offset_optimizer": "adam",
                "offset_aggregation": "network",
                "generator": {"width": 32},
            },
            "training": {"lr": 0.1, "batch_size": 16},
            "rounds": {"count": 3, "min_clients": 3},
        }
    )


def digits_clients(plan: FederationPlan) -> list[SimulatedClient]:
    train, test = load_digits(plan.image)
    classes = len(plan.classes)
    parts = [
        type(data)(data.images[data.labels < classes], data.labels[data.labels < classes]) for data in (train, test)
    ]
    return share_out(*parts, paper_shares(classes, 3, 4, seed=0), seed=0)


def test_three_sites_train_to_the_end_with_the_same_bits_as_the_simulation(db_url: str, tmp_path: Path) -> None:
    """Rounds over HTTP and in memory are the same computation, to the bit."""
    plan = network_plan()
    clients = digits_clients(plan)
    half = client_half(plan)
    with running(db_url, tmp_path, forked=True) as coordinator:
        coordinator.create(plan)
        sites = [
            coordinator.join(plan, client.record.id, dict(zip(plan.classes, client.record.class_counts, strict=True)))
            for client in clients
        ]
        for number in range(1, plan.rounds.count + 1):
            for site, client in zip(sites, clients, strict=True):
                task = site.task()
                assert task.action == "train"
                assert task.round is not None
                assert task.round.number == number
                assert task.model is not None
                assert task.personal_url is not None
                round_task = RoundTask(
                    site.name, number, site.tensors(task.model.url), site.tensors(task.personal_url), task.facts
                )
                predictor = half.predictor(round_task, client.private, Runtime())
                measured = evaluate(predictor, client.test.batches(64, 0), client.own_classes)
                answer = site.http.put(
                    f"/v1/models/{task.model.number}/evaluation",
                    json=measured.model_dump(),
                    headers=site.headers,
                )
                assert answer.status_code == 204
                update, client.private = half.train(round_task, client.private, TrainingContext(client.train))
                assert site.put(task.round.id, update.encode()).status_code == 200
        finished = sites[0].wait_until_finished()
        assert finished.model is not None
        assert finished.model.number == 3
        view = coordinator.show(plan.name)
        assert (view.state, view.rounds_done, view.best_accuracy is not None) == ("finished", 3, True)
        rounds = coordinator.admin("GET", f"/v1/federations/{plan.name}/rounds")
        assert [round_["state"] for round_ in rounds] == ["done"] * 3
        assert all(round_["evaluation"]["samples"] for round_ in rounds[:2])
        model = sites[0].tensors(finished.model.url)
    simulation = Simulation(plan, digits_clients(plan))
    run_all(simulation)
    assert digest(encode(model)) == digest(encode(simulation.state.shared))
