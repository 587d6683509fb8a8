"""How well a client's predictor does on held-out images, with the split that exposes an "offset ⇒ label" shortcut."""

import math
from collections.abc import Collection, Iterable
from typing import Annotated

import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from shared.method_options import Frozen
from shared.methods.base import Predictor
from shared.methods.local import mean_loss
from shared.problems import DistransError
from shared.schemas import MAX_IMAGES, MAX_LOSS

_Count = Annotated[int, Field(ge=0, le=MAX_IMAGES)]


class Evaluation(Frozen):
    """Counts over held-out images. Positives are of a class that the client trains on, negatives of any other."""

    model_config = ConfigDict(strict=True)
    samples: _Count
    correct: _Count
    loss_sum: float = Field(ge=0, le=MAX_LOSS * MAX_IMAGES)
    negatives: _Count = 0
    negatives_correct: _Count = 0
    negatives_as_own: _Count = Field(0, description="Negatives predicted as one of the client's own classes.")

    @property
    def accuracy(self) -> float | None:
        """N-way accuracy; None without images."""
        return self.correct / self.samples if self.samples else None

    @property
    def positive_accuracy(self) -> float | None:
        """N-way accuracy on the client's own classes."""
        positives = self.samples - self.negatives
        return (self.correct - self.negatives_correct) / positives if positives else None

    @property
    def negative_accuracy(self) -> float | None:
        """N-way accuracy on the other classes."""
        return self.negatives_correct / self.negatives if self.negatives else None

    @property
    def binary_accuracy(self) -> float | None:
        """Own class or not: ½ (positive accuracy + 1 − share of negatives taken for an own class)."""
        if self.positive_accuracy is None or not self.negatives:
            return None
        return 0.5 * (self.positive_accuracy + 1 - self.negatives_as_own / self.negatives)

    def __add__(self, other: "Evaluation") -> "Evaluation":
        # Not validated: the limits are for what one client reports, not for all clients together.
        sums = {name: getattr(self, name) + getattr(other, name) for name in Evaluation.model_fields}
        return Evaluation.model_construct(**sums)


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
