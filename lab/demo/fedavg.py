"""FedAvg on a demo's sites, in memory, for comparison."""

import os

import torch
from rich.console import Console

from client_agent.data.dataset import SiteData, open_data
from client_agent.serving.candidates import Base
from client_agent.serving.measurement import measure_bases
from lab.datasets.site_folders import SiteFolder
from lab.demo.display import stage
from lab.simulation.simulation import SimulatedClient, Simulation
from shared.contract.method_options import FedAvgOptions
from shared.contract.plan import FederationPlan
from shared.learning.methods.base import ClientRecord, Predictor


def threads(plan: FederationPlan, at_once: int) -> int:
    """Return the threads per training for this many at once; LeNet is too small to gain from a second one."""
    return 1 if plan.model.backbone == "lenet" else max(1, (os.cpu_count() or 1) // at_once)


def train_fedavg(
    console: Console, plan: FederationPlan, sites: list[SiteFolder], rounds: int
) -> dict[str, float | None]:
    """Train FedAvg on the same sites, with the same start and rounds; return its accuracy on each site's test images.

    These are the images that the site's agent tests with.
    """
    fedavg = plan.model_copy(update={"method": FedAvgOptions()})
    torch.set_num_threads(threads(plan, 1))
    data: dict[str, SiteData] = {}
    clients = []
    for site in sites:
        opened = data[site.name] = open_data(str(site.path), plan)
        record = ClientRecord(site.name, tuple(opened.report.class_counts.values()))
        clients.append(SimulatedClient(record, opened.train, opened.test))
    simulation = Simulation(fedavg, clients)
    with stage(console, "training FedAvg for comparison") as add:
        for number in range(1, rounds + 1):
            add(f"round {number} of {rounds}")
            simulation.run_round()
    return {
        client.record.id: _accuracy(
            simulation.client.predictor(simulation.task(client), client.private, simulation.runtime),
            data[client.record.id],
            plan.seed,
        )
        for client in clients
    }


def _accuracy(predictor: Predictor, data: SiteData, seed: int) -> float | None:
    """Return the accuracy on the test images, chosen as the agent chooses them; None without any."""
    measured = measure_bases({Base.GLOBAL: predictor}, data, seed)
    if measured is None or not len(measured.holdout.test):
        return None
    test = measured.holdout.test
    right = measured.logits[Base.GLOBAL][test].argmax(dim=1) == measured.labels[test]
    return float(right.double().mean())
