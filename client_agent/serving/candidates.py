"""Candidates: the models a site could serve, all computed from the logits of a few base models.

    global    the federation's model on the unmodified image
    personal  the model that the federation made for this site (pFedMe, pFedHN), instead of a global one
    offset    the federation's model with this site's offset
    adapted   the federation's model, with the offset if there is one, fine-tuned on this site's images
    alone     the same network, trained on this site's images only

Global, offset and adapted predict as if classes were as frequent as in the federation; a prior adjusts their logits to
the site. Personal and alone assume the site's frequencies from the start.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import torch
from torch import Tensor


class Base(StrEnum):
    """A model whose logits candidates are computed from."""

    GLOBAL = "global"
    PERSONAL = "personal"
    OFFSET = "offset"
    ADAPTED = "adapted"
    ALONE = "alone"

    @property
    def assumes_site_prior(self) -> bool:
        """Whether it predicts as if classes were as frequent as at this site, rather than in the federation."""
        return self in (Base.PERSONAL, Base.ALONE)

    @property
    def has_offset(self) -> bool:
        """Whether it sees images with this site's offset, if the method has offsets."""
        return self in (Base.OFFSET, Base.ADAPTED)


@dataclass(frozen=True)
class Member:
    """A base model as part of a candidate, with or without the site's prior."""

    base: Base
    uses_prior: bool = False

    @property
    def name(self) -> str:
        """For example `offset+prior`."""
        return f"{self.base}+prior" if self.uses_prior else str(self.base)


Mixed = Literal["probabilities", "logits"]


@dataclass(frozen=True)
class Candidate:
    """A weighted sum of the members' probabilities or logits; most candidates have a single member.

    Weights of probabilities sum to one. Those of logits need not: they also say how far each model is to be trusted.
    """

    name: str
    weights: tuple[tuple[Member, float], ...]
    mixed: Mixed = "probabilities"

    @property
    def is_federated(self) -> bool:
        """Whether any part of it comes from the federation."""
        return any(member.base is not Base.ALONE for member, _ in self.weights)

    def probabilities(self, logits: Mapping[Member, Tensor]) -> Tensor:
        """Return the probabilities that follow from the members' logits, each (images, classes)."""
        return mix([(logits[member], weight) for member, weight in self.weights], self.mixed)


def mix(parts: Sequence[tuple[Tensor, float]], mixed: Mixed) -> Tensor:
    """Return the probabilities (images, classes) of weighted logits."""
    if mixed == "logits":
        return torch.softmax(torch.stack([weight * values for values, weight in parts]).sum(dim=0), dim=1)
    return torch.stack([weight * torch.softmax(values, dim=1) for values, weight in parts]).sum(dim=0)


BLEND = "blend"  # the candidate whose weights are fitted to the validation images


def single(member: Member) -> Candidate:
    """Return the candidate that consists of one model."""
    return Candidate(member.name, ((member, 1.0),))


def mean_of(first: Member, second: Member) -> Candidate:
    """Return the plain mean of two models' probabilities."""
    return Candidate(f"{first.name} & {second.name}", ((first, 0.5), (second, 0.5)))


def blended_members(bases: Collection[Base], has_prior: bool) -> list[Member]:
    """Return the members of the blend: each base model once, with the prior where it makes a difference."""
    return [Member(base, has_prior and not base.assumes_site_prior) for base in Base if base in bases]


def as_trained(bases: Collection[Base], has_prior: bool) -> Candidate:
    """Return the federation's model as it was trained, with the prior: what to serve without any measurement."""
    trained = next(base for base in (Base.OFFSET, Base.PERSONAL, Base.GLOBAL) if base in bases)
    return single(Member(trained, has_prior and not trained.assumes_site_prior))


def fixed_candidates(bases: Collection[Base], has_prior: bool) -> list[Candidate]:
    """Return the candidates with fixed weights in order of preference: means, single models, alone last."""
    members = blended_members(bases, has_prior)
    federated = [member for member in members if member.base is not Base.ALONE]
    means = [mean_of(one, other) for place, one in enumerate(members) for other in members[place + 1 :]]
    without_prior = [Member(member.base) for member in federated if member.uses_prior]
    last = [member for member in members if member.base is Base.ALONE]
    return means + [single(member) for member in [*reversed(federated), *reversed(without_prior), *last]]


def member_logits(
    logits: Mapping[Base, Tensor], shift: Tensor | None, members: Collection[Member]
) -> dict[Member, Tensor]:
    """Return each member's logits; `shift` is what the prior adds to those of its base model."""
    return {
        member: logits[member.base].float() + (shift if member.uses_prior and shift is not None else 0.0)
        for member in members
    }
