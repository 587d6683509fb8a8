"""The running mean of one round, and checks of its inputs and its result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shared.learning.methods.base import ClientRecord, ServerHalf
from shared.tensors.arrays import Array, Arrays, is_float
from shared.tensors.mean import RunningMean

if TYPE_CHECKING:
    from torch import Tensor

OUTLIER_FACTOR = 1000.0
_PIECE = 1 << 16  # elements; checked while they are in a core's cache


class RoundFold:
    """Running mean of a round. The order of updates does not matter.

    However many clients there are, it takes two to four times the memory of an ordinary float32 model (see `ExactSum`),
    and as much as one model for `arrays`, in which each update is loaded, and in the end the mean. Compressed updates
    take less, but the round's model is kept too.
    """

    def __init__(self, half: ServerHalf, base: Mapping[str, Array] | None = None) -> None:
        """`base` is the model that the round started from; only compressed updates need it."""
        self._half, self._base = half, base or {}
        self._mean = RunningMean()
        self.folded: set[str] = set()
        self.arrays: Arrays = {}

    def add(self, client: ClientRecord, uploaded: "Mapping[str, Array] | Mapping[str, Tensor]") -> None:
        """Fold in the shared tensors of a client's upload, weighted by its record. A repeat changes nothing."""
        if client.id not in self.folded:
            self._half.fold(self._mean, self._half.received(uploaded, self._base), client)
            self.folded.add(client.id)

    def mean(self) -> Arrays:
        """Return the mean of the updates so far, in `arrays` if there are any and they have its form."""
        return self._mean.result({} if self._base else self.arrays)


def first_nonfinite(tensors: Mapping[str, Array]) -> str | None:
    """Return the name of a tensor with an infinity or NaN, or None if all are finite."""
    return next((name for name, value in tensors.items() if is_float(value) and not _is_finite(value)), None)


def _is_finite(values: Array) -> bool:
    flat = values.reshape(-1)
    return all(bool(np.isfinite(flat[begin : begin + _PIECE]).all()) for begin in range(0, flat.size, _PIECE))


@dataclass(frozen=True)
class Peak:
    """The largest absolute value of one client's update, and the tensor that holds it."""

    client: str
    tensor: str
    value: float


def peak_of(client: str, update: Mapping[str, Array]) -> Peak:
    """Return the largest absolute value of an update."""
    found = Peak(client, "", 0.0)
    for name, tensor in update.items():
        value = float(np.abs(tensor).max()) if is_float(tensor) and tensor.size else 0.0
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
