"""Candidates: the models a site could serve, all computed from the logits of up to four base models.

    global    the federation's model on the unmodified image
    offset    the federation's model with this site's offset
    adapted   the latter, fine-tuned on this site's images
    alone     the same network, trained on this site's images only

The first three predict as if classes were as frequent as in the federation; a prior adjusts their logits to the site.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor


class Base(StrEnum):
    """A model whose logits candidates are computed from."""

    GLOBAL = "global"
    OFFSET = "offset"
    ADAPTED = "adapted"
    ALONE = "alone"


@dataclass(frozen=True)
class Member:
    """A base model as part of a candidate, with or without the site's prior."""

    base: Base
    uses_prior: bool = False

    @property
    def name(self) -> str:
        """For example `offset+prior`."""
        return f"{self.base}+prior" if self.uses_prior else str(self.base)


@dataclass(frozen=True)
class Candidate:
    """A weighted mean of the members' probabilities; most candidates have a single member."""

    name: str
    weights: tuple[tuple[Member, float], ...]

    @property
    def is_federated(self) -> bool:
        """Whether any part of it comes from the federation."""
        return any(member.base is not Base.ALONE for member, _ in self.weights)

    def probabilities(self, members: Mapping[Member, Tensor]) -> Tensor:
        """Mix the members' probabilities, each (images, classes)."""
        return torch.stack([weight * members[member] for member, weight in self.weights]).sum(dim=0)


BLEND = "blend"  # the candidate whose weights are fitted to the validation images


def single(member: Member) -> Candidate:
    """Return the candidate that consists of one model."""
    return Candidate(member.name, ((member, 1.0),))


def mean_of(first: Member, second: Member) -> Candidate:
    """Return the plain mean of two models' probabilities."""
    return Candidate(f"{first.name} & {second.name}", ((first, 0.5), (second, 0.5)))


def blended_members(bases: Collection[Base], has_prior: bool) -> list[Member]:
    """Return the members of the blend: each base model once, with the prior where there is one."""
    return [Member(base, has_prior and base is not Base.ALONE) for base in Base if base in bases]


def fixed_candidates(bases: Collection[Base], has_prior: bool) -> list[Candidate]:
    """Return the candidates with fixed weights in order of preference: means, single models, alone last."""
    members = blended_members(bases, has_prior)
    federated = [member for member in members if member.base is not Base.ALONE]
    means = [mean_of(one, other) for place, one in enumerate(members) for other in members[place + 1 :]]
    without_prior = [Member(member.base) for member in federated if member.uses_prior]
    last = [member for member in members if member.base is Base.ALONE]
    return means + [single(member) for member in [*reversed(federated), *reversed(without_prior), *last]]


def member_probabilities(
    logits: Mapping[Base, Tensor], shift: Tensor | None, members: Collection[Member]
) -> dict[Member, Tensor]:
    """Return each member's probabilities; `shift` is the prior's addition to the logits."""
    found: dict[Member, Tensor] = {}
    for member in members:
        values = logits[member.base].float()
        found[member] = torch.softmax(values + shift if member.uses_prior and shift is not None else values, dim=1)
    return found
