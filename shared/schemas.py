"""Bodies of the REST API that both sides read and write."""

from pydantic import Field

from shared.method_options import Frozen
from shared.summation import MAX_WEIGHT


class TrainingReport(Frozen):
    """What a client says of its local training in one round; small numbers, no data."""

    samples: int = Field(ge=1, le=MAX_WEIGHT, description="Training images of the client.")
    batches: int = Field(ge=0, description="Optimisation steps taken.")
    loss: float = Field(ge=0, description="Mean cross-entropy over the images trained on, as they were met.")
    accuracy: float = Field(ge=0, le=1, description="Share of them that was classified rightly, as they were met.")
    seconds: float = Field(ge=0, description="Time of the training itself.")
    offset_motion: float | None = Field(None, ge=0, description="‖t − t⁰‖ / ‖t⁰‖; none for methods without offset.")
