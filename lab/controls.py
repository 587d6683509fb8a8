"""How well a federation does, beside two controls that know a client's label prior and nothing else.

The model of any method is asked once; its logits are then also *masked* to the classes that the client trains on, and
*re-weighted* by the client's own class frequencies over everybody's (each count plus one). What a method gains over
FedAvg with such logits is more than knowing which classes a client has.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lab.simulation import EVALUATION_BATCH, SimulatedClient, Simulation
from shared.evaluation import Evaluation, evaluate

_NEVER = -1e9  # finite: evaluation takes anything else for a diverged model
_NOTHING = Evaluation(samples=0, correct=0, loss_sum=0.0)


@dataclass(frozen=True)
class Scores:
    """One client's evaluation, or that of several together: as the method predicts, and under the two controls."""

    plain: Evaluation = _NOTHING
    masked: Evaluation = _NOTHING
    reweighted: Evaluation = _NOTHING

    def __add__(self, other: "Scores") -> "Scores":
        return Scores(self.plain + other.plain, self.masked + other.masked, self.reweighted + other.reweighted)


def score(simulation: Simulation) -> dict[str, Scores]:
    """Every client's scores with the model as it is now, by client id."""
    counts = torch.tensor([record.class_counts for record in simulation.roster], dtype=torch.float64)
    return {client.record.id: _score(simulation, client, counts.sum(dim=0)) for client in simulation.clients}


def _score(simulation: Simulation, client: SimulatedClient, everybody: Tensor) -> Scores:
    counts = torch.tensor(client.record.class_counts, dtype=torch.float64)
    mask = torch.where(counts > 0, 0.0, _NEVER).float()
    weights = (_log_frequencies(counts) - _log_frequencies(everybody)).float()
    predictor = simulation.client.predictor(simulation.task(client), client.private, simulation.runtime)
    total = Scores()
    for images, labels in client.test.batches(EVALUATION_BATCH, seed=0):
        logits = predictor(images).cpu()
        total += Scores(*(_count(logits + shift, labels, client) for shift in (0.0, mask, weights)))
    return total


def _log_frequencies(counts: Tensor) -> Tensor:
    return ((counts + 1) / (counts + 1).sum()).log()


def _count(logits: Tensor, labels: Tensor, client: SimulatedClient) -> Evaluation:
    return evaluate(lambda _: logits, [(logits, labels)], client.own_classes)
