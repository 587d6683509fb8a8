"""Server halves with torch's tensors, which tests compare with what torch computes."""

from typing import Any

from shared.contract.plan import FederationPlan
from shared.learning import methods
from shared.learning.methods.tensor_half import TensorHalf


class TestedHalf(TensorHalf):
    """A server half with all its calls and attributes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.half, name)


def server_half(plan: FederationPlan) -> TestedHalf:
    """Return the coordinator's half of the plan's method."""
    return TestedHalf(methods.server_half(plan))
