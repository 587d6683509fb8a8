"""The base models' logits on the held-out images: computed once per decision, everything else is arithmetic on them."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from client_agent.data.dataset import SiteData, unreadable_limit
from client_agent.data.holdout import Holdout, split_holdout
from client_agent.serving.candidates import Base
from shared.contract.errors import DistransError
from shared.learning.methods.base import Predictor

logger = logging.getLogger(__name__)
_BATCH = 128
_OWN = (Base.ADAPTED, Base.ALONE)  # if one of these fails, the others can still be measured


@dataclass(frozen=True)
class Measured:
    """Logits (images, classes) of each base model, the labels, and which images choose and which test."""

    logits: Mapping[Base, Tensor]
    labels: Tensor
    holdout: Holdout


def measure_bases(predictors: Mapping[Base, Predictor], data: SiteData, seed: int) -> Measured | None:
    """Run all base models over the readable held-out images; None if there are none or too many cannot be read.

    A model of the site's own that fails is left out.
    """
    if not data.test.samples:
        return None
    working, found, positions = dict(predictors), {base: list[Tensor]() for base in predictors}, list[Tensor]()
    for places, images, _ in data.test.in_order(_BATCH):
        positions.append(places)
        for base, predictor in list(working.items()):
            try:
                found[base].append(_finite(predictor(images).float().cpu(), base))
            except Exception as error:
                if base not in _OWN:
                    raise
                logger.warning("the %s model cannot be measured: %s", base, error)
                del working[base]
    places = torch.cat(positions) if positions else torch.zeros(0, dtype=torch.int64)
    if data.test.samples - len(places) > unreadable_limit(data.test.samples):
        return None
    split = split_holdout(data.test.labels, seed)
    validation, test = (torch.nonzero(torch.isin(places, part))[:, 0] for part in (split.validation, split.test))
    logits = {base: torch.cat(found[base]) for base in working}
    return Measured(logits, data.test.labels[places], Holdout(validation, test, split.is_split))


def _finite(logits: Tensor, base: Base) -> Tensor:
    if base in _OWN and not bool(logits.isfinite().all()):
        raise DistransError("Its answers are not finite.")
    return logits
