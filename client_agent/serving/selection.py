"""Chooses what to serve: fits the blend's weights and compares the candidates on validation images.

The blend is a weighted sum of the base models' logits, that is, a product of their probabilities. A model that is too
sure of itself, as one trained on few images is, gets a small weight instead of drowning out the others. The weights
maximize the likelihood of the validation labels, minus a penalty for their distance from weights that trust the global
model most, so that a handful of images cannot rule a model out.

Log loss rather than accuracy decides: with ten images, accuracy moves in steps of ten points.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from client_agent.serving.candidates import (
    BLEND,
    Base,
    Candidate,
    Member,
    as_trained,
    blended_members,
    fixed_candidates,
    member_logits,
)

# The blend's weights before any image has been seen, and how firmly they hold. Found on digits and Fashion-MNIST with
# seeds that no reported result uses; see docs/reproducing.md. Penalties from 3 to 100 do about equally well.
EXPECTED_WEIGHTS = {Base.GLOBAL: 0.6, Base.PERSONAL: 0.6, Base.OFFSET: 0.2, Base.ADAPTED: 0.1, Base.ALONE: 0.1}
PENALTY = 10.0
_SMALLEST = 1e-3  # weight; above zero, because a prior that rules a class out has infinite logits
_NEGLIGIBLE = 0.02  # members with less weight are not worth a forward pass
_BLEND_ERRORS = 2.0  # standard errors by which the blend may be worse than the best and still be chosen; others: one
_LEAST = 1e-6  # probability, so that one certain mistake does not decide alone
MAX_FOLDS = 10
Logits = Mapping[Member, Tensor]  # each (images, classes)
Calibration = Callable[[Tensor, Tensor], Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Choice:
    """The candidate to serve, and every candidate's mean log loss on the validation images, by name."""

    candidate: Candidate
    losses: Mapping[str, float]


def choose(logits: Mapping[Base, Tensor], labels: Tensor, shift: Tensor | None) -> Choice:
    """Choose a candidate from the base models' logits (images, classes) on validation images, in any order.

    The first candidate in order of preference wins whose log loss exceeds the lowest by at most one standard error, or
    two for the blend, which comes first. Alone comes last. Without images, the choice is the model as trained.
    """
    bases = [base for base in Base if base in logits]
    if not len(labels):
        return Choice(as_trained(bases, shift is not None), {})
    members = blended_members(bases, shift is not None)
    candidates = fixed_candidates(bases, shift is not None)
    found = member_logits(logits, shift, _all_members(candidates))
    losses = {one.name: _log_losses(one.probabilities(found), labels) for one in candidates}
    blend = fit_blend(found, labels, members)
    if len(blend.weights) > 1:  # otherwise it is one of the others
        candidates = [blend, *candidates]
        losses[BLEND] = _log_losses(_cross_fitted(found, labels, members), labels)
    best = min(losses.values(), key=lambda loss: float(loss.mean()))
    errors = {BLEND: _BLEND_ERRORS}
    chosen = next(one for one in candidates if _excess(losses[one.name], best) <= errors.get(one.name, 1.0))
    return Choice(chosen, {name: float(loss.mean()) for name, loss in losses.items()})


def cross_fit(
    logits: Mapping[Base, Tensor], labels: Tensor, shift: Tensor | None, calibrate: Calibration | None = None
) -> Tensor:
    """Return probabilities for every image from a candidate that was chosen, and calibrated, without it.

    They show how well the choice works where there are too few images to keep some for testing only. `calibrate` gets
    the other images' probabilities and labels and returns what to do with this image's.
    """
    probabilities = torch.empty_like(next(iter(logits.values())), dtype=torch.float32)
    members = blended_members(list(logits), shift is not None)
    for part in folds(labels, member_logits(logits, shift, members)):
        rest = complement(part, len(labels))
        chosen = choose({base: values[rest] for base, values in logits.items()}, labels[rest], shift).candidate
        found = chosen.probabilities(member_logits(logits, shift, [member for member, _ in chosen.weights]))
        probabilities[part] = calibrate(found[rest], labels[rest])(found[part]) if calibrate else found[part]
    return probabilities


def fit_blend(logits: Logits, labels: Tensor, members: Sequence[Member]) -> Candidate:
    """Return the weighted sum of the members' logits that explains the labels best, without negligible members."""
    weights = _fit_weights(logits, labels, members)
    kept = [member for member, weight in zip(members, weights, strict=True) if weight >= _NEGLIGIBLE] or members
    if len(kept) < len(members):
        weights = _fit_weights(logits, labels, kept)
    return Candidate(BLEND, tuple(zip(kept, weights, strict=True)), mixed="logits")


def expected_weights(members: Sequence[Member]) -> list[float]:
    """Return the weights that are assumed before any image has been seen; their sum is one."""
    weights = [EXPECTED_WEIGHTS[member.base] for member in members]
    return [weight / sum(weights) for weight in weights]


def folds(labels: Tensor, logits: Logits) -> list[Tensor]:
    """Split images into up to MAX_FOLDS parts of about equal size, class mix and difficulty; every part has an image.

    Images are told apart by label and likelihoods alone, so that the parts do not depend on the images' order.
    """
    keys = [*(_likelihoods(torch.softmax(logits[member], dim=1), labels) for member in logits), labels]
    order = torch.from_numpy(np.lexsort([key.numpy() for key in keys]))  # the last key is the most important one
    count = min(MAX_FOLDS, len(labels))
    return [order[start::count] for start in range(count)]


def complement(part: Tensor, count: int) -> Tensor:
    """Return a mask of all images but these."""
    outside = torch.ones(count, dtype=torch.bool)
    outside[part] = False
    return outside


def _fit_weights(logits: Logits, labels: Tensor, members: Sequence[Member]) -> list[float]:
    """Maximize the penalized likelihood, which is concave: any start leads to the same weights."""
    values = torch.stack([logits[member] for member in members], dim=2).double().numpy()  # images, classes, members
    own = values[np.arange(len(labels)), labels.numpy()]
    expected = np.array(expected_weights(members))

    def objective(weights: np.ndarray) -> tuple[float, np.ndarray]:
        mixed = values @ weights
        mixed -= mixed.max(axis=1, keepdims=True)
        odds = np.exp(mixed)
        total = odds.sum(axis=1)
        mean = np.einsum("ic,icm->im", odds / total[:, None], values)
        distance = weights - expected
        loss = (np.log(total) - mixed[np.arange(len(labels)), labels.numpy()]).sum()
        return loss + PENALTY / 2 * distance @ distance, (mean - own).sum(axis=0) + PENALTY * distance

    bounds = [(_SMALLEST, None)] * len(members)
    options = {"ftol": 1e-14, "gtol": 1e-9}
    fitted = minimize(objective, expected, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return [float(weight) for weight in fitted.x]


def _cross_fitted(logits: Logits, labels: Tensor, members: Sequence[Member]) -> Tensor:
    """Return the blend's probabilities with weights fitted to other images; its own would flatter it."""
    mixed = torch.empty_like(logits[members[0]])
    for part in folds(labels, {member: logits[member] for member in members}):
        rest = complement(part, len(labels))
        blend = fit_blend({member: logits[member][rest] for member in members}, labels[rest], members)
        mixed[part] = blend.probabilities({member: logits[member][part] for member in members})
    return mixed


def _excess(loss: Tensor, best: Tensor) -> float:
    """Return by how many standard errors of the difference a loss exceeds the best one."""
    difference = (loss - best).double()
    error = float(difference.std()) / len(difference) ** 0.5 if len(difference) > 1 else float("inf")
    mean = float(difference.mean())
    return mean / error if error else math.copysign(math.inf, mean) if mean else 0.0


def _likelihoods(probabilities: Tensor, labels: Tensor) -> Tensor:
    return probabilities.gather(1, labels[:, None])[:, 0]


def _log_losses(probabilities: Tensor, labels: Tensor) -> Tensor:
    return -_likelihoods(probabilities, labels).clamp_min(_LEAST).log()


def _all_members(candidates: Collection[Candidate]) -> list[Member]:
    return list(dict.fromkeys(member for candidate in candidates for member, _ in candidate.weights))
