"""How well a model did on held-out images, with the split that exposes an "offset ⇒ label" shortcut.

`shared.measuring` does the counting; what only reads stored figures need not load torch.
"""

from typing import Annotated

from pydantic import ConfigDict, Field

from shared.method_options import Frozen
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
