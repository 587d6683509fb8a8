"""What is evaluated once, after the last round, because it needs more training or more images.

    fine-tuned        the predicting model, fine-tuned at each client with the plain loss
    served            what an agent would serve: each client's choice among its candidates
    foreign-classes   images of classes that a client does not have, with and without its offset, without its prior

Each part returns counts by name, pooled over all clients.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from client_agent.serving.candidates import Base, Candidate, Member
from client_agent.serving.selection import choose, cross_fit
from lab.datasets.clients import foreign_images
from lab.simulation.alone import AloneSimulation
from lab.simulation.controls import EVALUATION_BATCH
from lab.simulation.simulation import SimulatedClient, Simulation
from shared.contract.class_totals import CLASS_TOTALS
from shared.contract.errors import DistransError
from shared.learning.adaptation import adapt, adapted_predictor
from shared.learning.methods.base import LocalData, Predictor, RoundTask, TrainingContext
from shared.learning.site_prior import site_prior_shift

FinalPart = Literal["fine-tuned", "served", "foreign-classes"]
ADAPTATION_EPOCHS = 10
MAX_FOREIGN_IMAGES = 300  # per client


@dataclass(frozen=True)
class Counts:
    """How many of how many images were right."""

    samples: int = 0
    correct: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.samples + other.samples, self.correct + other.correct)

    @classmethod
    def of(cls, scores: Tensor, labels: Tensor) -> "Counts":
        """Count the images (n, classes) whose largest logit or probability is their label's."""
        if not bool(scores.isfinite().all()):
            raise DistransError("The model's logits are not finite: training has diverged.")
        return cls(len(labels), int((scores.argmax(dim=1) == labels).sum()))


@dataclass(frozen=True)
class Served:
    """Counts of the candidates' members and of what is served, and each client's choice on all of its images."""

    counts: dict[str, Counts]
    choices: dict[str, dict[str, Any]]


def fine_tuned(simulation: Simulation) -> Counts:
    """Evaluate each client's predicting model after fine-tuning it on the client's images."""
    total = Counts()
    for client in _tested(simulation):
        task = simulation.task(client)
        # Without the federation's totals the loss is the plain one, as is usual.
        plain = replace(task, facts={name: value for name, value in task.facts.items() if name != CLASS_TOTALS})
        total += Counts.of(*_predict(_adapted(simulation, client, plain), client.test))
    return total


def served(simulation: Simulation, alone: AloneSimulation) -> Served:
    """Let every client choose among its candidates, as its agent would; `alone` has the same clients.

    Every image is predicted by a candidate that was chosen without it.
    """
    by_id = {client.record.id: client for client in alone.clients}
    counts: dict[str, Counts] = {}
    choices = {}
    for client in _tested(simulation):
        task = simulation.task(client)
        shift = site_prior_shift(simulation.plan, task, client.train)
        itself = by_id[client.record.id]
        predictors = {
            Base.GLOBAL: simulation.client.predictor(task, client.private, simulation.runtime, use_offset=False),
            Base.OFFSET: simulation.client.predictor(task, client.private, simulation.runtime),
            Base.ADAPTED: _adapted(simulation, client, task),
            Base.ALONE: alone.client.predictor(alone.task(itself), {}, alone.runtime),
        }
        outputs = {base: _predict(predictor, client.test) for base, predictor in predictors.items()}
        logits = {base: output for base, (output, _) in outputs.items()}
        labels = outputs[Base.GLOBAL][1]
        scores = {Member(base).name: values for base, values in logits.items()}
        if shift is not None:
            scores |= {Member(base, True).name: logits[base] + shift for base in logits if base is not Base.ALONE}
        scores["served"] = cross_fit(logits, labels, shift)
        for name, values in scores.items():
            counts[name] = counts.get(name, Counts()) + Counts.of(values, labels)
        choices[client.record.id] = _described(choose(logits, labels, shift).candidate)
    return Served(counts, choices)


def foreign_classes(simulation: Simulation) -> Mapping[str, Counts]:
    """Evaluate on images of classes that a client does not have but that look like its own; `foreign` and more.

    `foreign_without_offset` is counted for methods with offsets only.
    """
    total = {"foreign": Counts()}
    for client in simulation.clients:
        images = foreign_images(client, MAX_FOREIGN_IMAGES, simulation.plan.seed)
        task, half = simulation.task(client), simulation.client
        forms = {"foreign": True}
        if half.offset(task, client.private) is not None:
            forms["foreign_without_offset"] = False
        for name, use_offset in forms.items():
            counted = Counts()
            if images.samples:
                predictor = half.predictor(task, client.private, simulation.runtime, use_offset=use_offset)
                counted = Counts.of(*_predict(predictor, images))
            total[name] = total.get(name, Counts()) + counted
    return total


def _tested(simulation: Simulation) -> Iterable[SimulatedClient]:
    return (client for client in simulation.clients if client.test.samples)


def _adapted(simulation: Simulation, client: SimulatedClient, task: RoundTask) -> Predictor:
    half, private = simulation.client, client.private
    context = TrainingContext(client.train, simulation.runtime)
    weights = adapt(half, task, private, context, epochs=ADAPTATION_EPOCHS)
    if weights is None:
        raise DistransError(f"{simulation.plan.method.name} has no single network to fine-tune.")
    return adapted_predictor(half, task, private, weights, simulation.runtime)


def _predict(predictor: Predictor, data: LocalData) -> tuple[Tensor, Tensor]:
    """Return logits and labels of all images."""
    pairs = [(predictor(images).cpu(), labels) for images, labels in data.batches(EVALUATION_BATCH, seed=0)]
    logits, labels = zip(*pairs, strict=True)
    return torch.cat(logits), torch.cat(labels)


def _described(candidate: Candidate) -> dict[str, Any]:
    weights = {member.name: round(weight, 4) for member, weight in candidate.weights}
    return {"candidate": candidate.name, "weights": weights}
