"""Chooses what to serve: fits the blend's weights and compares the candidates on validation images.

The blend is a mixture of the base models. Its weights maximize the likelihood of the validation labels, with one
imaginary image per model as prior, so that a handful of images cannot rule a model out. Log loss rather than accuracy
decides: with ten images, accuracy moves in steps of ten points.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from client_agent.serving.candidates import (
    BLEND,
    Base,
    Candidate,
    Member,
    as_trained,
    blended_members,
    fixed_candidates,
    member_probabilities,
)

_PSEUDO_IMAGES = 1.0  # per member of the blend
_STEPS = 100  # of expectation maximization; converges long before
_NEGLIGIBLE = 0.05  # members with less weight are not worth a forward pass
_LEAST = 1e-6  # probability, so that one certain mistake does not decide alone
MAX_FOLDS = 10
Likelihoods = Mapping[Member, Tensor]  # each (images,)
Calibration = Callable[[Tensor, Tensor], Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Choice:
    """The candidate to serve, and every candidate's mean log loss on the validation images, by name."""

    candidate: Candidate
    losses: Mapping[str, float]


def choose(logits: Mapping[Base, Tensor], labels: Tensor, shift: Tensor | None) -> Choice:
    """Choose a candidate from the base models' logits (images, classes) on validation images, in any order.

    The first candidate in order of preference wins whose log loss exceeds the lowest by at most one standard error.
    The blend comes first and alone last. Without images, the choice is the model as trained.
    """
    bases = [base for base in Base if base in logits]
    if not len(labels):
        return Choice(as_trained(bases, shift is not None), {})
    members = blended_members(bases, shift is not None)
    candidates = fixed_candidates(bases, shift is not None)
    likelihoods = _likelihoods(logits, labels, shift, _all_members(candidates))
    losses = {one.name: _log_losses(_mix(one, likelihoods)) for one in candidates}
    blend = fit_blend(likelihoods, members)
    if len(blend.weights) > 1:  # otherwise it is one of the others
        candidates = [blend, *candidates]
        losses[BLEND] = _log_losses(_cross_fitted(likelihoods, labels, members))
    best = min(losses.values(), key=lambda loss: float(loss.mean()))
    chosen = next(one for one in candidates if _is_no_worse(losses[one.name], best))
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
    for part in folds(labels, _likelihoods(logits, labels, shift, members)):
        rest = complement(part, len(labels))
        chosen = choose({base: values[rest] for base, values in logits.items()}, labels[rest], shift).candidate
        parts = member_probabilities(logits, shift, [member for member, _ in chosen.weights])
        found = chosen.probabilities(parts)
        probabilities[part] = calibrate(found[rest], labels[rest])(found[part]) if calibrate else found[part]
    return probabilities


def fit_blend(likelihoods: Likelihoods, members: Sequence[Member]) -> Candidate:
    """Return the mixture of the members that explains the labels best; negligible members are left out."""
    weights = _mixture_weights(likelihoods, members)
    kept = [member for member, weight in zip(members, weights.tolist(), strict=True) if weight >= _NEGLIGIBLE]
    if len(kept) < len(members):
        weights = _mixture_weights(likelihoods, kept)
    return Candidate(BLEND, tuple(zip(kept, weights.tolist(), strict=True)))


def folds(labels: Tensor, likelihoods: Likelihoods) -> list[Tensor]:
    """Split images into up to MAX_FOLDS parts of about equal size, class mix and difficulty; every part has an image.

    Images are told apart by label and likelihoods alone, so that the parts do not depend on the images' order.
    """
    keys = [*(likelihoods[member] for member in likelihoods), labels]
    order = torch.from_numpy(np.lexsort([key.numpy() for key in keys]))  # the last key is the most important one
    count = min(MAX_FOLDS, len(labels))
    return [order[start::count] for start in range(count)]


def complement(part: Tensor, count: int) -> Tensor:
    """Return a mask of all images but these."""
    outside = torch.ones(count, dtype=torch.bool)
    outside[part] = False
    return outside


def _likelihoods(
    logits: Mapping[Base, Tensor], labels: Tensor, shift: Tensor | None, members: Collection[Member]
) -> dict[Member, Tensor]:
    """Return the probability that each member gives to each image's label: all that a log loss depends on."""
    return {
        member: probabilities.gather(1, labels[:, None])[:, 0]
        for member in members
        for probabilities in member_probabilities(logits, shift, [member]).values()
    }


def _mix(candidate: Candidate, likelihoods: Likelihoods) -> Tensor:
    return torch.stack([weight * likelihoods[member] for member, weight in candidate.weights]).sum(dim=0)


def _mixture_weights(likelihoods: Likelihoods, members: Sequence[Member]) -> Tensor:
    likelihood = torch.stack([likelihoods[member].clamp_min(_LEAST) for member in members], dim=1).double()
    weights = torch.full((len(members),), 1 / len(members), dtype=torch.float64)
    for _ in range(_STEPS):
        shares = likelihood * weights
        shares /= shares.sum(dim=1, keepdim=True)
        weights = shares.sum(dim=0) + _PSEUDO_IMAGES
        weights /= weights.sum()
    return weights


def _cross_fitted(likelihoods: Likelihoods, labels: Tensor, members: Sequence[Member]) -> Tensor:
    """Return the blend's likelihoods with weights fitted to other images; its own would flatter it."""
    mixed = torch.empty_like(likelihoods[members[0]])
    for part in folds(labels, {member: likelihoods[member] for member in members}):
        rest = complement(part, len(labels))
        blend = fit_blend({member: likelihoods[member][rest] for member in members}, members)
        mixed[part] = _mix(blend, {member: likelihoods[member][part] for member in members})
    return mixed


def _is_no_worse(loss: Tensor, best: Tensor) -> bool:
    difference = (loss - best).double()
    error = float(difference.std()) / len(difference) ** 0.5 if len(difference) > 1 else float("inf")
    return float(difference.mean()) <= error


def _log_losses(likelihoods: Tensor) -> Tensor:
    return -likelihoods.clamp_min(_LEAST).log()


def _all_members(candidates: Collection[Candidate]) -> list[Member]:
    return list(dict.fromkeys(member for candidate in candidates for member, _ in candidate.weights))
