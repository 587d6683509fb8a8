"""The model that answers: built and checked aside, then swapped in by a single assignment."""

import logging
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from client_agent.errors import StateError
from client_agent.model_key import ModelKey
from client_agent.settings import Identity
from client_agent.state.folder import StateFolder
from client_agent.state.kept_models import Bundle
from shared.contract.errors import DistransError
from shared.contract.plan import FederationPlan
from shared.learning.methods import client_half
from shared.learning.methods.base import Predictor
from shared.learning.runtime import Runtime
from shared.tensors.wire import digest, encode

logger = logging.getLogger(__name__)


class RankedClass(NamedTuple):
    """A class and its probability."""

    label: str
    class_id: int
    probability: float


@dataclass(frozen=True)
class ServingModel:
    """A model with this site's offset, ready to answer. Immutable."""

    with_offset: Predictor = field(repr=False)
    without_offset: Predictor = field(repr=False)  # for comparison
    federation: str
    key: ModelKey
    offset_digest: str | None  # None if the method has no offset
    classes: tuple[str, ...]

    def rank(self, probabilities: Tensor, top_k: int) -> list[list[RankedClass]]:
        """Return the `top_k` most probable classes of each row, best first."""
        values, positions = probabilities.topk(min(top_k, len(self.classes)), dim=1)
        return [
            [RankedClass(self.classes[place], place, value) for value, place in zip(row, places, strict=True)]
            for row, places in zip(values.tolist(), positions.tolist(), strict=True)
        ]


def build(plan: FederationPlan, name: str, bundle: Bundle, runtime: Runtime) -> ServingModel:
    """Build a model and run it once; raise DistransError if its answer is not finite."""
    half, task = client_half(plan), bundle.task(name)
    offset = half.offset(task, bundle.private)
    model = ServingModel(
        with_offset=half.predictor(task, bundle.private, runtime),
        without_offset=half.predictor(task, bundle.private, runtime, use_offset=False),
        federation=plan.name,
        key=bundle.key,
        offset_digest=None if offset is None else offset_digest(offset),
        classes=plan.classes,
    )
    if not bool(model.with_offset(torch.zeros(1, *plan.image.shape)).isfinite().all()):
        raise DistransError(f"The answers of model {bundle.number} are not finite.")
    return model


def offset_digest(offset: Tensor) -> str:
    """Return the digest that identifies an offset."""
    return digest(encode({"offset": offset}))


def load_served(state: StateFolder, identity: Identity, runtime: Runtime) -> tuple[Bundle, ServingModel]:
    """Load the model that this site predicts with: `/predict`, `distrans-agent predict` and `export` use the same.

    A model that cannot be read or built is passed over for the next choice; raises StateError if none is left.
    """
    models = state.models
    servable = models.servable()
    if models.lacks_pinned():
        logger.warning("/predict is pinned to model %d, which is no longer kept", models.pinned())
    for kept in servable:
        try:
            bundle = models.load(kept)
            return bundle, build(identity.plan, identity.name, bundle, runtime)
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
