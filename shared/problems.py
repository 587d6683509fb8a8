"""The errors a person or a peer can cause, each with a stable code, a sentence and, where one exists, the next step.

DistransError
├── PlanError       a plan that cannot be carried out
├── BackboneError   a network that cannot take these images, or cannot be found
├── WeightsError    initial weights that do not fit the network
├── WireError       bytes that are not the tensors they should be
├── SplitError      data that cannot be shared out as asked
└── ForeignAnswer   a response that is not a coordinator's
"""


class DistransError(Exception):
    """Base of every error that is the fault of an input. `str(error)` is fit to be shown to a person."""

    code = "error"
    exit_code = 1  # of a command that it ends

    def __init__(self, message: str, *, next_step: str | None = None) -> None:
        super().__init__(message if next_step is None else f"{message} {next_step}")
        self.message = message
        self.next_step = next_step


class PlanError(DistransError):
    """A plan that cannot be carried out."""

    code = "invalid-plan"


class BackboneError(DistransError):
    """A backbone that does not exist or cannot take images of the plan's shape."""

    code = "invalid-backbone"


class WeightsError(DistransError):
    """Initial weights that do not fit the network."""

    code = "invalid-weights"


class WireError(DistransError):
    """Bytes that are not the tensors they should be."""

    code = "invalid-tensors"


class SplitError(DistransError):
    """Data that cannot be shared out among clients as asked."""

    code = "invalid-split"


class ForeignAnswer(DistransError):
    """A response that is not a coordinator's, such as the page of a proxy on the way."""

    code = "foreign-answer"

    def __init__(self, status: int) -> None:
        super().__init__(
            f"What answered ({status}) is not a coordinator.",
            next_step="Check --server, and proxies on the way: they may also ask for a client certificate.",
        )
