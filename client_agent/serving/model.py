"""What answers: a candidate, built and checked aside, then swapped in by a single assignment."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from client_agent.errors import StateError
from client_agent.model_key import ModelKey
from client_agent.serving.bases import build_base, federated_bases
from client_agent.serving.calibration import apply_temperature
from client_agent.serving.candidates import Base, Candidate, Member, as_trained, mix
from client_agent.serving.class_counts import ClassCounts, class_counts
from client_agent.settings import SITE_PRIOR, Identity, PriorKind, ServedPrior
from client_agent.state.folder import StateFolder
from client_agent.state.kept_models import Bundle, KeptModel, decode_tensors
from client_agent.state.records import CandidateRecord
from shared.contract.errors import DistransError
from shared.contract.plan import FederationPlan
from shared.learning.methods import client_half
from shared.learning.methods.base import Predictor
from shared.learning.runtime import Runtime
from shared.tensors.names import Tensors
from shared.tensors.wire import digest, encode

logger = logging.getLogger(__name__)


class RankedClass(NamedTuple):
    """A class and its probability."""

    label: str
    class_id: int
    probability: float


class View(NamedTuple):
    """How a caller wants to be answered."""

    use_offset: bool = True
    prior: PriorKind | None = None  # None: the agent's


AS_SERVED = View()


@dataclass(frozen=True)
class ServingModel:
    """A candidate with its predictors, ready to answer. Immutable."""

    predictors: Mapping[Base, Predictor] = field(repr=False)  # of all members, and global to replace an offset
    candidate: Candidate
    federation: str
    key: ModelKey
    classes: tuple[str, ...]
    offset_digest: str | None = None  # None if no member has an offset
    offset: Tensor | None = field(default=None, repr=False, compare=False)  # this site's, as (C, H, W)
    record: str = ""  # digest of the candidate's record
    temperature: float = 1.0
    counts: ClassCounts = field(default=ClassCounts(), repr=False)
    prior: PriorKind = "site"

    def members(self, view: View = AS_SERVED) -> list[tuple[Member, float]]:
        """Return the members that answer with their weights; without the offset, global replaces those that have it."""
        if view.use_offset or not self.has_offset:
            return list(self.candidate.weights)
        weights: dict[Member, float] = {}
        for member, weight in self.candidate.weights:
            seen = Member(Base.GLOBAL, member.uses_prior) if member.base.has_offset else member
            weights[seen] = weights.get(seen, 0.0) + weight
        return list(weights.items())

    @property
    def has_offset(self) -> bool:
        """Whether any member sees images with this site's offset."""
        return self.offset_digest is not None

    def applied_prior(self, view: View = AS_SERVED) -> PriorKind | None:
        """Return the class frequencies that answers assume; None if the prior cannot be applied."""
        return self.counts.applied(self.candidate, view.prior or self.prior)

    @cached_property
    def _shifts(self) -> dict[tuple[Member, PriorKind], Tensor | None]:
        members = {member for use_offset in (True, False) for member, _ in self.members(View(use_offset))}
        kinds: set[PriorKind] = {"site", "none", self.prior}
        return {(member, kind): self.counts.shift(member, kind) for member in members for kind in kinds}

    def mix(self, logits: Mapping[Base, Tensor], view: View = AS_SERVED) -> Tensor:
        """Return the calibrated probabilities (B, classes) from the base models' logits."""
        parts = []
        for member, weight in self.members(view):
            shift, values = self._shifts[member, view.prior or self.prior], logits[member.base]
            parts.append((values if shift is None else values + shift, weight))
        return apply_temperature(mix(parts, self.candidate.mixed), self.temperature)

    def predict(self, images: Tensor, view: View = AS_SERVED) -> Tensor:
        """Return the probabilities (B, classes) of images (B, C, H, W)."""
        bases = dict.fromkeys(member.base for member, _ in self.members(view))
        return self.mix({base: self.predictors[base](images).cpu() for base in bases}, view)

    def rank(self, probabilities: Tensor, top_k: int) -> list[list[RankedClass]]:
        """Return the `top_k` most probable classes of each row, best first."""
        values, positions = probabilities.topk(min(top_k, len(self.classes)), dim=1)
        return [
            [RankedClass(self.classes[place], place, value) for value, place in zip(row, places, strict=True)]
            for row, places in zip(values.tolist(), positions.tolist(), strict=True)
        ]


@dataclass(frozen=True)
class Recipe:
    """What a bundle is served as: the candidate, its temperature, the site's class counts and its own weights."""

    candidate: Candidate
    temperature: float = 1.0
    site_counts: tuple[int, ...] | None = None
    weights: Mapping[str, Tensors] = field(default_factory=dict, repr=False)
    record: str = ""


def build(
    plan: FederationPlan,
    name: str,
    bundle: Bundle,
    runtime: Runtime,
    recipe: Recipe | None = None,
    prior: ServedPrior = SITE_PRIOR,
    built: Mapping[Base, Predictor] | None = None,
) -> ServingModel:
    """Build what to serve and run it once; raise DistransError if its answer is not finite.

    Without a recipe, it is the model as it was trained, without a prior. Predictors that are `built` already are used.
    """
    half, task = client_half(plan), bundle.task(name)
    bases = federated_bases(plan, name, bundle)
    recipe = recipe or Recipe(as_trained(bases, has_prior=False))
    members = [member.base for member, _ in recipe.candidate.weights]
    offset = half.offset(task, bundle.private)
    applied = offset if any(base.has_offset for base in members) else None
    needed, known = dict.fromkeys([*members, *([Base.GLOBAL] if applied is not None else [])]), built or {}
    model = ServingModel(
        predictors={
            base: known[base] if base in known else build_base(base, plan, name, bundle, recipe.weights, runtime)
            for base in needed
        },
        candidate=recipe.candidate,
        federation=plan.name,
        key=bundle.key,
        classes=plan.classes,
        offset_digest=None if applied is None else offset_digest(applied),
        offset=offset,
        record=recipe.record,
        temperature=recipe.temperature,
        counts=class_counts(plan, bundle, recipe.site_counts).served_as(prior, plan.classes),
        prior=prior.kind,
    )
    if not bool(model.predict(torch.zeros(1, *plan.image.shape)).isfinite().all()):
        raise DistransError(f"The answers of model {bundle.number} are not finite.")
    if prior.kind != "none" and model.applied_prior() is None:
        logger.info("model %d is served without a prior: the class counts are not known", bundle.number)
    return model


def offset_digest(offset: Tensor) -> str:
    """Return the digest that identifies an offset."""
    return digest(encode({"offset": offset}))


def load_recipe(state: StateFolder, kept: KeptModel) -> Recipe | None:
    """Return what a kept model is served as; None if nothing was chosen. Raises StateError if it is damaged."""
    name = state.models.record_name(kept)
    if not name:
        return None
    record = kept.candidates.load(name)
    weights = {base: decode_tensors(kept.folder, body) for base, body in kept.candidates.weights(record).items()}
    return Recipe(candidate_of(record), record.temperature, record.site_counts, weights, name)


def candidate_of(record: CandidateRecord) -> Candidate:
    """Return the candidate that a record describes."""
    weights = tuple((Member(Base(one.base), one.uses_prior), one.weight) for one in record.members)
    return Candidate(record.name, weights, record.mixed)


def load_model(
    state: StateFolder, identity: Identity, kept: KeptModel, runtime: Runtime, prior: ServedPrior
) -> tuple[Bundle, ServingModel]:
    """Load a kept model as it is served; raise an error if it cannot be read or built."""
    bundle = state.models.load(kept)
    return bundle, build(identity.plan, identity.name, bundle, runtime, load_recipe(state, kept), prior)


def load_served(
    state: StateFolder, identity: Identity, runtime: Runtime, prior: ServedPrior
) -> tuple[Bundle, ServingModel]:
    """Load the model that this site predicts with: `/predict`, `distrans-agent predict` and `export` use the same.

    A model that cannot be read or built is passed over for the next choice; raises StateError if none is left.
    """
    models = state.models
    servable = models.servable()
    if models.lacks_pinned():
        logger.warning("/predict is pinned to model %d, which is no longer kept", models.pinned())
    for kept in servable:
        try:
            return load_model(state, identity, kept, runtime, prior)
        except Exception as error:  # whatever is wrong with this one, another may work
            logger.warning("kept model %d cannot be served: %s", kept.key.number, error)
    if servable:
        raise StateError(
            f"None of the {len(servable)} approved models kept here can be read.",
            next_step="See the log for the reasons; restore the models folder from a backup, or wait for a new model.",
        )
    if models.all():
        raise StateError(
            "The gate has approved none of the kept models.",
            next_step="See distrans-agent status for the reasons; distrans-agent pin ROUND serves one anyway.",
        )
    raise StateError("There is no model yet.", next_step="Run distrans-agent run until a round is done.")
