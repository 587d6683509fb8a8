"""Expected errors, each with a stable code, a readable message and, where there is one, a next step.

DistransError
├── PlanError       an invalid plan
├── BackboneError   a backbone that is missing, fails to load or does not fit the images
├── WeightsError    initial weights that do not fit the network
├── WireError       bytes that do not hold the expected tensors
├── SplitError      a data split that is impossible as requested
└── ForeignAnswer   a response that did not come from a coordinator
"""


class DistransError(Exception):
    """Base class of all expected errors; `str(error)` is written for the user."""

    code = "error"
    exit_code = 1  # of the command it terminates

    def __init__(self, message: str, *, next_step: str | None = None) -> None:
        super().__init__(message if next_step is None else f"{message} {next_step}")
        self.message = message
        self.next_step = next_step


class PlanError(DistransError):
    """An invalid plan."""

    code = "invalid-plan"


class BackboneError(DistransError):
    """A backbone that is missing, fails to load or does not fit the plan's images."""

    code = "invalid-backbone"


class WeightsError(DistransError):
    """Initial weights that do not fit the network."""

    code = "invalid-weights"


class WireError(DistransError):
    """Bytes that do not hold the expected tensors."""

    code = "invalid-tensors"


class SplitError(DistransError):
    """A data split that is impossible as requested."""

    code = "invalid-split"


class ForeignAnswer(DistransError):
    """A response that did not come from a coordinator, such as a proxy's error page."""

    code = "foreign-answer"

    def __init__(self, status: int) -> None:
        super().__init__(
            f"The response (HTTP {status}) did not come from a coordinator.",
            next_step="Check --server and any proxy in between, which may also require a client certificate.",
        )
