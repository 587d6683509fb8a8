"""Chooses what to serve: fits the blend's weights and compares the candidates on validation images.

The blend is a mixture of the base models. Its weights maximize the likelihood of the validation labels, with one
imaginary image per model as prior, so that a handful of images cannot rule a model out. Log loss rather than accuracy
decides: with ten images, accuracy moves in steps of ten points.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from client_agent.serving.candidates import (
    BLEND,
    Base,
    Candidate,
    Member,
    blended_members,
    fixed_candidates,
    member_probabilities,
)

_PSEUDO_IMAGES = 1.0  # per member of the blend
_STEPS = 100  # of expectation maximization; converges long before
_NEGLIGIBLE = 0.05  # members with less weight are not worth a forward pass
_LEAST = 1e-6  # probability, so that one certain mistake does not decide alone
MAX_FOLDS = 10


@dataclass(frozen=True)
class Choice:
    """The candidate to serve, and every candidate's mean log loss on the validation images, by name."""

    candidate: Candidate
    losses: Mapping[str, float]


def choose(logits: Mapping[Base, Tensor], labels: Tensor, shift: Tensor | None) -> Choice:
    """Choose a candidate from the base models' logits (images, classes) on validation images.

    The first candidate in order of preference wins whose log loss exceeds the lowest by at most one standard error.
    The blend comes first and alone last. Without images, the choice is the model as trained: offset or global, with
    the prior.
    """
    bases = [base for base in Base if base in logits]
    members = blended_members(bases, shift is not None)
    fixed = fixed_candidates(bases, shift is not None)
    if not len(labels):
        trained = Base.OFFSET if Base.OFFSET in bases else bases[0]
        return Choice(next(one for one in fixed if one.weights[0] == (members[bases.index(trained)], 1.0)), {})
    probabilities = member_probabilities(logits, shift, _all_members(fixed))
    losses = {one.name: _log_losses(one.probabilities(probabilities), labels) for one in fixed}
    candidates = fixed
    if len(members) > 1:
        blend = fit_blend(probabilities, labels, members)
        candidates = [blend, *fixed]
        losses[BLEND] = _log_losses(_cross_fitted(probabilities, labels, members), labels)
    best = min(losses.values(), key=lambda loss: float(loss.mean()))
    chosen = next(one for one in candidates if _is_no_worse(losses[one.name], best))
    return Choice(chosen, {name: float(loss.mean()) for name, loss in losses.items()})


def cross_fit(logits: Mapping[Base, Tensor], labels: Tensor, shift: Tensor | None) -> Tensor:
    """Return probabilities for every image from a candidate that was chosen without it.

    They show how well the choice works where there are too few images to keep some for testing only.
    """
    probabilities = torch.empty_like(next(iter(logits.values())), dtype=torch.float32)
    for part in folds(labels):
        rest = _complement(part, len(labels))
        chosen = choose({base: values[rest] for base, values in logits.items()}, labels[rest], shift).candidate
        members = member_probabilities(logits, shift, [member for member, _ in chosen.weights])
        probabilities[part] = chosen.probabilities(members)[part]
    return probabilities


def fit_blend(probabilities: Mapping[Member, Tensor], labels: Tensor, members: Sequence[Member]) -> Candidate:
    """Return the mixture of the members that explains the labels best; negligible members are left out."""
    weights = _mixture_weights(probabilities, labels, members)
    kept = [member for member, weight in zip(members, weights.tolist(), strict=True) if weight >= _NEGLIGIBLE]
    if len(kept) < len(members):
        weights = _mixture_weights(probabilities, labels, kept)
    return Candidate(BLEND, tuple(zip(kept, weights.tolist(), strict=True)))


def folds(labels: Tensor) -> list[Tensor]:
    """Split images into up to MAX_FOLDS parts of about equal size and class mix; every part has an image."""
    order = torch.argsort(labels, stable=True)
    count = min(MAX_FOLDS, len(labels))
    return [order[start::count] for start in range(count)]


def _mixture_weights(probabilities: Mapping[Member, Tensor], labels: Tensor, members: Sequence[Member]) -> Tensor:
    likelihood = torch.stack([_of_label(probabilities[member], labels) for member in members], dim=1).double()
    weights = torch.full((len(members),), 1 / len(members), dtype=torch.float64)
    for _ in range(_STEPS):
        shares = likelihood * weights
        shares /= shares.sum(dim=1, keepdim=True)
        weights = shares.sum(dim=0) + _PSEUDO_IMAGES
        weights /= weights.sum()
    return weights


def _cross_fitted(probabilities: Mapping[Member, Tensor], labels: Tensor, members: Sequence[Member]) -> Tensor:
    """Return the blend's probabilities with weights fitted to other images; its own would flatter it."""
    if len(labels) == 1:
        return fit_blend(probabilities, labels[:0], members).probabilities(probabilities)
    mixed = torch.empty_like(probabilities[members[0]])
    for part in folds(labels):
        rest = _complement(part, len(labels))
        blend = fit_blend({one: probabilities[one][rest] for one in members}, labels[rest], members)
        mixed[part] = blend.probabilities({one: probabilities[one][part] for one in members})
    return mixed


def _complement(part: Tensor, count: int) -> Tensor:
    outside = torch.ones(count, dtype=torch.bool)
    outside[part] = False
    return outside


def _is_no_worse(loss: Tensor, best: Tensor) -> bool:
    difference = (loss - best).double()
    error = float(difference.std()) / len(difference) ** 0.5 if len(difference) > 1 else float("inf")
    return float(difference.mean()) <= error


def _log_losses(probabilities: Tensor, labels: Tensor) -> Tensor:
    return -_of_label(probabilities, labels).log()


def _of_label(probabilities: Tensor, labels: Tensor) -> Tensor:
    return probabilities.gather(1, labels[:, None])[:, 0].clamp_min(_LEAST)


def _all_members(candidates: Collection[Candidate]) -> list[Member]:
    return list(dict.fromkeys(member for candidate in candidates for member, _ in candidate.weights))
