"""The running mean of one round, and checks of its inputs and its result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shared.learning.methods.base import ClientRecord, PersonalUploads, RoundContext, ServerHalf, ServerState
from shared.tensors.mean import RunningMean
from shared.tensors.names import Tensors

OUTLIER_FACTOR = 1000.0
_PIECE = 1 << 14  # elements


class RoundFold:
    """Running mean of a round. The order of updates does not matter.

    However many clients there are, it takes two to four times the memory of an ordinary float32 model (see `ExactSum`),
    and that of the round's model if updates are compressed.
    """

    def __init__(self, half: ServerHalf, base: Tensors | None = None) -> None:
        """`base` is the model that the round started from; only compressed updates need it."""
        self._half, self._base = half, base or {}
        self._mean = RunningMean()
        self.folded: set[str] = set()

    def add(self, client: ClientRecord, uploaded: Tensors) -> None:
        """Fold in the shared tensors of a client's upload, weighted by its record. A repeat changes nothing."""
        if client.id not in self.folded:
            self._half.fold(self._mean, self._half.received(uploaded, self._base), client)
            self.folded.add(client.id)

    def finish(self, state: ServerState, personal: PersonalUploads, round_: RoundContext) -> ServerState:
        """Return the state after the round; `personal` yields uploaded personal tensors in client-id order."""
        return self._half.finish(state, self._mean.result(), personal, round_)


def first_nonfinite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of a tensor with an infinity or NaN, or None if all are finite."""
    return next((name for name, value in tensors.items() if value.is_floating_point() and not _is_finite(value)), None)


def _is_finite(values: Tensor) -> bool:
    # In pieces too small for torch's threads, which on a busy machine wait for each other for most of their time.
    return all(bool(piece.isfinite().all()) for piece in values.reshape(-1).split(_PIECE))


@dataclass(frozen=True)
class Peak:
    """The largest absolute value of one client's update, and the tensor that holds it."""

    client: str
    tensor: str
    value: float


def peak_of(client: str, update: Mapping[str, Tensor]) -> Peak:
    """Return the largest absolute value of an update."""
    found = Peak(client, "", 0.0)
    for name, tensor in update.items():
        value = float(tensor.abs().max()) if tensor.is_floating_point() and tensor.numel() else 0.0
        found = Peak(client, name, value) if value > found.value else found
    return found


def blame(peaks: Sequence[Peak]) -> str:
    """Name the client whose update broke a round if one stands out, else the one with the largest value."""
    if not peaks:
        return "no update of the round is readable"
    first, *others = sorted(peaks, key=lambda peak: -peak.value)
    where = f"the update from {first.client!r} has values up to {first.value:.3g} in {first.tensor!r}"
    if not others:
        return where
    second = f"{others[0].value:.3g} is the largest in any other update"
    stands_out = first.value > OUTLIER_FACTOR * others[0].value
    return f"{where}; {second}" if stands_out else f"no update stands out: {where}, {second}"
