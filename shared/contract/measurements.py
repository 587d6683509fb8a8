"""What clients measure: a report on local training, and evaluations on held-out images.

Evaluations count own and other classes separately, which exposes an "offset ⇒ label" shortcut.
"""

from typing import Annotated

from pydantic import ConfigDict, Field

from shared.contract.frozen import Frozen
from shared.contract.limits import MAX_IMAGES, MAX_LOSS

_Count = Annotated[int, Field(ge=0, le=MAX_IMAGES)]


class TrainingReport(Frozen):
    """A client's summary of one round of local training: a few numbers, no data."""

    model_config = ConfigDict(strict=True)  # true and "5" are not numbers
    samples: int = Field(ge=1, le=MAX_IMAGES, description="Training images at the client.")
    batches: int = Field(ge=0, le=2**53, description="Optimization steps taken.")
    loss: float = Field(
        ge=0, le=MAX_LOSS, description="Mean cross-entropy over the training images, measured during training."
    )
    accuracy: float = Field(ge=0, le=1, description="Training accuracy, measured during training.")
    seconds: float = Field(ge=0, le=1e9, description="Duration of training alone.")
    offset_motion: float | None = Field(
        None,
        ge=0,
        le=1e9,
        description="‖t − t⁰‖ / ‖t⁰‖, or the RMS of t if t⁰ = 0; null for methods without an offset.",
    )


class Evaluation(Frozen):
    """Counts over held-out images. Positives belong to a class the client trains on, negatives to any other."""

    model_config = ConfigDict(strict=True)
    samples: _Count
    correct: _Count
    loss_sum: float = Field(ge=0, le=MAX_LOSS * MAX_IMAGES)
    negatives: _Count = 0
    negatives_correct: _Count = 0
    negatives_as_own: _Count = Field(0, description="Negatives predicted as one of the client's own classes.")

    @property
    def accuracy(self) -> float | None:
        """N-way accuracy, or None without images."""
        return self.correct / self.samples if self.samples else None

    @property
    def positive_accuracy(self) -> float | None:
        """N-way accuracy on the client's own classes."""
        positives = self.samples - self.negatives
        return (self.correct - self.negatives_correct) / positives if positives else None

    @property
    def negative_accuracy(self) -> float | None:
        """N-way accuracy on all other classes."""
        return self.negatives_correct / self.negatives if self.negatives else None

    @property
    def binary_accuracy(self) -> float | None:
        """Own class or not: ½ (positive accuracy + 1 − share of negatives predicted as an own class)."""
        if self.positive_accuracy is None or not self.negatives:
            return None
        return 0.5 * (self.positive_accuracy + 1 - self.negatives_as_own / self.negatives)

    def __add__(self, other: "Evaluation") -> "Evaluation":
        # Not validated: the limits apply to one client's report, not to totals.
        sums = {name: getattr(self, name) + getattr(other, name) for name in Evaluation.model_fields}
        return Evaluation.model_construct(**sums)
