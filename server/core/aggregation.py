"""A round's running mean in memory, fed with stored updates in any order."""

from collections.abc import Iterable, Sequence

from shared.methods.base import PERSONAL, SHARED, ClientRecord, Facts, ServerHalf, ServerState, Tensors
from shared.schemas import TrainingReport
from shared.summation import RunningMean


class RoundFold:
    """Memory for one model, however many clients; the result depends on the set of updates alone."""

    def __init__(self, half: ServerHalf) -> None:
        self._half = half
        self._mean = RunningMean()
        self.folded: set[str] = set()

    def add(self, client_id: str, update: Tensors, report: TrainingReport) -> None:
        """Fold in the shared tensors of one client's update, once."""
        if client_id not in self.folded:
            self._half.fold(self._mean, strip(update, SHARED), report)
            self.folded.add(client_id)

    def finish(
        self,
        state: ServerState,
        personal: Iterable[tuple[ClientRecord, Tensors]],
        roster: Sequence[ClientRecord],
        facts: Facts,
    ) -> ServerState:
        """The state after the round; `personal` yields the uploaded personal tensors in client-id order."""
        return self._half.finish(state, self._mean.result(), personal, roster, facts)


def strip(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors whose wire names start with the prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def personal_part(update: Tensors) -> Tensors:
    """The personal tensors of an update."""
    return strip(update, PERSONAL)
