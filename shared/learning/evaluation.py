"""Evaluation of a predictor on held-out images."""

import math
from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from shared.contract.errors import DistransError
from shared.contract.limits import MAX_LOSS
from shared.contract.measurements import Evaluation
from shared.learning.methods.base import Predictor
from shared.learning.methods.training_loop import mean_loss


def evaluate(
    predictor: Predictor, batches: Iterable[tuple[Tensor, Tensor]], own_classes: Collection[int]
) -> Evaluation:
    """Evaluate the predictor, which may be on any device, on batches of (images, labels).

    A batch's mean loss is capped at MAX_LOSS. Raise a DistransError if logits or loss are not finite.
    """
    total = Evaluation(samples=0, correct=0, loss_sum=0.0)
    own = torch.tensor(sorted(own_classes), dtype=torch.int64)
    for images, labels in batches:
        logits = predictor(images).cpu()
        if not bool(logits.isfinite().all()):
            raise DistransError("The model's logits are not finite: training has diverged.")
        loss = float(mean_loss(logits, labels))
        if not math.isfinite(loss):  # logits of ±2.5e38 are finite; their difference is not
            raise DistransError(
                f"The model's loss is not finite (largest logit {float(logits.abs().max()):.1e}): "
                "training has diverged, or a site has uploaded absurd weights."
            )
        predicted, negative = logits.argmax(dim=1), ~torch.isin(labels, own)
        right = predicted == labels
        total += Evaluation(
            samples=len(labels),
            correct=int(right.sum()),
            loss_sum=min(max(loss, 0.0), MAX_LOSS) * len(labels),
            negatives=int(negative.sum()),
            negatives_correct=int((right & negative).sum()),
            negatives_as_own=int((torch.isin(predicted, own) & negative).sum()),
        )
    return total
