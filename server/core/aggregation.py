"""A round's running mean in memory, fed with stored updates in any order."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shared.methods.base import PERSONAL, SHARED, ClientRecord, Facts, ServerHalf, ServerState, Tensors
from shared.summation import RunningMean

OUTLIER_FACTOR = 1000.0


class RoundFold:
    """Memory for one model, however many clients; the result depends on the set of updates alone."""

    def __init__(self, half: ServerHalf) -> None:
        self._half = half
        self._mean = RunningMean()
        self.folded: set[str] = set()

    def add(self, client: ClientRecord, update: Tensors) -> None:
        """Fold in the shared tensors of one client's update, once; what it weighs is in the client's record."""
        if client.id not in self.folded:
            self._half.fold(self._mean, strip(update, SHARED), client)
            self.folded.add(client.id)

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


def first_nonfinite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor that holds an infinity or a NaN; None when all are finite."""
    bad = (name for name, value in tensors.items() if value.is_floating_point() and not bool(value.isfinite().all()))
    return next(bad, None)


@dataclass(frozen=True)
class Peak:
    """The largest absolute value of one client's update, and the tensor that holds it."""

    client: str
    tensor: str
    value: float


def peak_of(client: str, update: Mapping[str, Tensor]) -> Peak:
    """Where an update is largest."""
    found = Peak(client, "", 0.0)
    for name, tensor in update.items():
        value = float(tensor.abs().max()) if tensor.is_floating_point() and tensor.numel() else 0.0
        found = Peak(client, name, value) if value > found.value else found
    return found


def blame(peaks: Sequence[Peak]) -> str:
    """Whose update broke a round, if one of them stands out; else whose was largest."""
    if not peaks:
        return "no update of the round can be read"
    first, *others = sorted(peaks, key=lambda peak: -peak.value)
    where = f"the update of {first.client!r} holds values up to {first.value:.3g} in {first.tensor!r}"
    if not others:
        return where
    second = f"{others[0].value:.3g} is the largest in any other"
    stands_out = first.value > OUTLIER_FACTOR * others[0].value
    return f"{where}; {second}" if stands_out else f"no update stands out: {where}, {second}"
