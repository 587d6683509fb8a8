"""Measures a predictor on held-out images."""

import math
from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from shared.evaluation import Evaluation
from shared.methods.base import Predictor
from shared.methods.local import mean_loss
from shared.problems import DistransError
from shared.schemas import MAX_LOSS


def evaluate(
    predictor: Predictor, batches: Iterable[tuple[Tensor, Tensor]], own_classes: Collection[int]
) -> Evaluation:
    """Count over all batches of (images, labels); the predictor may live on any device.

    Raises DistransError for a model without a finite loss. A batch's mean loss counts as at most MAX_LOSS.
    """
    total = Evaluation(samples=0, correct=0, loss_sum=0.0)
    own = torch.tensor(sorted(own_classes), dtype=torch.int64)
    for images, labels in batches:
        logits = predictor(images).cpu()
        if not bool(logits.isfinite().all()):
            raise DistransError("The model does not answer with finite numbers: training has diverged.")
        loss = float(mean_loss(logits, labels))
        if not math.isfinite(loss):  # logits of ±2.5e38 are finite; their difference is not
            raise DistransError(
                f"The model's loss is not finite, its largest logit is {float(logits.abs().max()):.1e}: "
                "training has diverged, or a site has sent absurd weights."
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
