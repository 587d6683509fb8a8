"""What clients measure: a report on local training, evaluations on held-out images, and whether joining paid off.

Evaluations count own and other classes separately, which exposes an "offset ⇒ label" shortcut.
"""

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from shared.contract.frozen import Frozen
from shared.contract.limits import MAX_IMAGES, MAX_LOSS
from shared.contract.patterns import PRINTABLE_PATTERN

_Count = Annotated[int, Field(ge=0, le=MAX_IMAGES)]
ALONE = "alone"  # the candidate that a site trained on its own images only


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


class PairedCounts(Frozen):
    """How the served model and the site's own one did on the same test images."""

    model_config = ConfigDict(strict=True)
    samples: _Count = Field(description="Test images; the sum of the other four.")
    both: _Count = Field(description="Images that both models got right.")
    only_served: _Count = Field(description="Images that only the served model got right.")
    only_alone: _Count = Field(description="Images that only the model trained alone got right.")
    neither: _Count = Field(description="Images that both models got wrong.")

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        parts = self.both + self.only_served + self.only_alone + self.neither
        if parts != self.samples:
            raise ValueError(f"both, only_served, only_alone and neither add up to {parts}, not to {self.samples}")
        return self

    def __add__(self, other: "PairedCounts") -> "PairedCounts":
        # Not validated: the limits apply to one client's report, not to totals.
        sums = {name: getattr(self, name) + getattr(other, name) for name in PairedCounts.model_fields}
        return PairedCounts.model_construct(**sums)

    @property
    def served_correct(self) -> int:
        """Images that the served model got right."""
        return self.both + self.only_served

    @property
    def alone_correct(self) -> int:
        """Images that the model trained alone got right."""
        return self.both + self.only_alone


class EvaluationReport(Evaluation):
    """What a client submits about a model: an evaluation and, if the site shares them, paired counts."""

    paired: PairedCounts | None = Field(None, description="Null: the site does not share its verdict, or has none.")
    candidate: Annotated[str, StringConstraints(max_length=64, pattern=PRINTABLE_PATTERN)] | None = Field(
        None, description=f"What the site serves; `{ALONE}` if it is its own model.", examples=["offset+prior"]
    )


class Interval(Frozen):
    """A 95 % confidence interval."""

    model_config = ConfigDict(extra="ignore")
    low: float
    high: float


Outcome = Literal["pays-off", "no-difference", "better-alone"]


class Verdict(Frozen):
    """Whether joining paid off at a site. Rates and their differences are shares of the test images, not percent."""

    model_config = ConfigDict(extra="ignore")  # part of responses, to which fields may be added
    paired: PairedCounts
    candidate: str | None = Field(None, description=f"What the site serves; `{ALONE}` if it is its own model.")
    served_accuracy: float | None
    served_interval: Interval = Field(description="Wilson's interval.")
    alone_accuracy: float | None
    alone_interval: Interval = Field(description="Wilson's interval.")
    difference: float | None = Field(description="Accuracy of the served model minus accuracy alone.")
    difference_interval: Interval = Field(description="95 %; includes zero exactly where the test shows no difference.")
    p_value: float = Field(description="Of the exact McNemar test, two-sided.")
    outcome: Outcome
    sentence: str
