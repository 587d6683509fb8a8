"""Evaluation of a simulated federation, with controls that show where its accuracy comes from.

Each model predicts once. Its logits are then also *masked* to the classes that the client trains on, and *reweighted*
by the client's class frequencies relative to everyone's (each count plus one). A method has
learned more than which classes a client has only if it beats FedAvg with such logits. A method with offsets predicts
again with the *foreign* offset of the next client: the drop shows how much the client's own offset contributes. The
*alternative* is the second model of a method that has two (pFedMe).
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from lab.simulation.simulation import SimulatedClient, Simulation
from shared.contract.measurements import Evaluation
from shared.learning.evaluation import evaluate
from shared.learning.methods.base import Predictor, RoundTask

EVALUATION_BATCH = 256
_NEVER = -1e9  # finite, because the evaluation treats anything else as a diverged model
_NOTHING = Evaluation(samples=0, correct=0, loss_sum=0.0)


@dataclass(frozen=True)
class Scores:
    """Evaluations of one or more clients: as the method predicts, and under each control."""

    plain: Evaluation = _NOTHING
    masked: Evaluation = _NOTHING
    reweighted: Evaluation = _NOTHING
    foreign: Evaluation = _NOTHING  # empty for methods without offsets
    alternative: Evaluation = _NOTHING  # empty for methods with one model

    def __add__(self, other: "Scores") -> "Scores":
        return Scores(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))


def score(simulation: Simulation) -> dict[str, Scores]:
    """Evaluate the current model at every client, on its test images; by client id."""
    counts = torch.tensor([record.class_counts for record in simulation.roster], dtype=torch.float64)
    clients = simulation.clients
    return {
        client.record.id: _score(simulation, client, following, counts.sum(dim=0))
        for client, following in zip(clients, [*clients[1:], clients[0]], strict=True)
    }


def _score(simulation: Simulation, client: SimulatedClient, following: SimulatedClient, everyone: Tensor) -> Scores:
    counts = torch.tensor(client.record.class_counts, dtype=torch.float64)
    mask = torch.where(counts > 0, 0.0, _NEVER).float()
    weights = (_log_frequencies(counts) - _log_frequencies(everyone)).float()
    task = simulation.task(client)
    predictor = simulation.client.predictor(task, client.private, simulation.runtime)
    foreign = _with_offset_of(following, simulation, client, task) if following is not client else None
    alternative = simulation.client.alternative(task, client.private, simulation.runtime)
    total = Scores()
    for images, labels in client.test.batches(EVALUATION_BATCH, seed=0):
        logits = predictor(images).cpu()
        total += Scores(
            plain=_count(logits, labels, client),
            masked=_count(logits + mask, labels, client),
            reweighted=_count(logits + weights, labels, client),
            foreign=_count(foreign(images).cpu(), labels, client) if foreign else _NOTHING,
            alternative=_count(alternative(images).cpu(), labels, client) if alternative else _NOTHING,
        )
    return total


def _with_offset_of(
    other: SimulatedClient, simulation: Simulation, client: SimulatedClient, task: RoundTask
) -> Predictor | None:
    """Return the client's predictor with the other client's offset; None for a method without offsets."""
    half = simulation.client
    if half.offset(task, client.private) is None:
        return None
    offset = half.offset(simulation.task(other), other.private)
    changed = {} if offset is None else {"offset": offset}
    personal = task.personal | changed if "offset" in task.personal else task.personal
    return half.predictor(replace(task, personal=personal), client.private | changed, simulation.runtime)


def _log_frequencies(counts: Tensor) -> Tensor:
    return ((counts + 1) / (counts + 1).sum()).log()


def _count(logits: Tensor, labels: Tensor, client: SimulatedClient) -> Evaluation:
    return evaluate(lambda _: logits, [(logits, labels)], client.own_classes)
