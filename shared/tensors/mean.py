"""The weighted mean of sets of tensors, bitwise independent of the order in which they arrive."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from shared.contract.errors import WireError
from shared.contract.limits import MAX_INTEGER, MAX_WEIGHT
from shared.tensors.arrays import Array, Arrays, as_arrays, empty, is_float, rounded
from shared.tensors.exact_sum import ExactSum, Scratch
from shared.tensors.spec import Entry, Spec

if TYPE_CHECKING:
    from torch import Tensor


class RunningMean:
    """The weighted mean of sets of named tensors, added one at a time; its memory does not grow with their number.

    Floating-point tensors are summed exactly and rounded to float64, divided, and rounded to their own dtype. Integer
    and boolean buffers (such as BatchNorm's counters) become the rounded mean in their own dtype.
    """

    def __init__(self) -> None:
        self.weight = 0
        self.terms = 0
        self._entries: Mapping[str, Entry] = {}
        self._sums: dict[str, ExactSum] = {}

    @property
    def size_bytes(self) -> int:
        """Memory of the sums."""
        return sum(total.size_bytes for total in self._sums.values())

    def add(self, tensors: "Mapping[str, Array] | Mapping[str, Tensor]", weight: int = 1) -> None:
        """Add one set, which must have the names, shapes and dtypes of the first."""
        if not 1 <= weight <= MAX_WEIGHT:
            raise WireError(f"The weight {weight} is outside 1 … {MAX_WEIGHT}.")
        entries, arrays = Spec.of(tensors).entries, as_arrays(tensors)
        if not self.terms:
            scratch = Scratch()
            self._entries = entries
            self._sums = {name: ExactSum(array.size, scratch) for name, array in arrays.items()}
        elif entries != self._entries:
            raise WireError("The sets of tensors to average differ in names, shapes or dtypes.")
        for name, array in arrays.items():
            if not is_float(array):
                _check_range(array)
            self._sums[name].add(array, weight)
        self.weight += weight
        self.terms += 1

    def result(self, into: Mapping[str, Array] | None = None) -> Arrays:
        """Return the mean of the sets added so far; it overwrites `into` and returns its arrays, if given."""
        if not self.terms:
            raise ValueError("nothing has been added to the mean")
        given = into or {}
        means = {
            name: given[name] if name in given else empty(entry.shape, entry.dtype)
            for name, entry in self._entries.items()
        }
        for name, mean in means.items():
            self._write(name, mean.reshape(-1))
        return means

    def _write(self, name: str, mean: Array) -> None:
        for where, total in self._sums[name].totals():
            total /= self.weight
            if mean.dtype == np.bool_:
                mean[where] = total > 0.5
            else:
                mean[where] = rounded(total if is_float(mean) else np.rint(total, out=total), mean.dtype)


def _check_range(numbers: Array) -> None:
    if numbers.size and not -MAX_INTEGER <= int(numbers.min()) <= int(numbers.max()) <= MAX_INTEGER:
        raise WireError(f"An integer buffer contains a value beyond ±{MAX_INTEGER}.")
