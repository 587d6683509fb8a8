"""The weighted mean of sets of tensors, bitwise independent of the order in which they arrive."""

import numpy as np
import torch
from torch import Tensor

from shared.contract.errors import WireError
from shared.contract.limits import MAX_INTEGER, MAX_WEIGHT
from shared.tensors.exact_sum import ExactSum, Scratch
from shared.tensors.names import Tensors


class RunningMean:
    """The weighted mean of sets of named tensors, added one at a time; its memory does not grow with their number.

    Floating-point tensors are summed exactly and rounded to float64, divided, and rounded to their own dtype. Integer
    and boolean buffers (such as BatchNorm's counters) become the rounded mean in their own dtype.
    """

    def __init__(self) -> None:
        self.weight = 0
        self.terms = 0
        self._shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._sums: dict[str, ExactSum] = {}

    @property
    def size_bytes(self) -> int:
        """Memory of the sums."""
        return sum(total.size_bytes for total in self._sums.values())

    def add(self, tensors: Tensors, weight: int = 1) -> None:
        """Add one set, which must have the names, shapes and dtypes of the first."""
        if not 1 <= weight <= MAX_WEIGHT:
            raise WireError(f"The weight {weight} is outside 1 … {MAX_WEIGHT}.")
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        if not self.terms:
            scratch = Scratch()
            self._shapes = shapes
            self._sums = {name: ExactSum(tensor.numel(), scratch) for name, tensor in tensors.items()}
        elif shapes != self._shapes:
            raise WireError("The sets of tensors to average differ in names, shapes or dtypes.")
        for name, tensor in tensors.items():
            if not tensor.is_floating_point():
                _check_range(tensor)
            self._sums[name].add(tensor, weight)
        self.weight += weight
        self.terms += 1

    def result(self) -> Tensors:
        """Return the mean of the sets added so far."""
        if not self.terms:
            raise ValueError("nothing has been added to the mean")
        means: Tensors = {}
        for name, (shape, dtype) in self._shapes.items():
            flat = torch.empty(shape.numel(), dtype=dtype)
            for where, total in self._sums[name].totals():
                total /= self.weight
                if dtype == torch.bool:
                    total[:] = total > 0.5
                elif not dtype.is_floating_point:
                    np.rint(total, out=total)
                flat[where] = torch.from_numpy(total)
            means[name] = flat.reshape(shape)
        return means


def _check_range(values: Tensor) -> None:
    numbers = values.numpy()  # numpy starts no threads
    if numbers.size and not -MAX_INTEGER <= int(numbers.min()) <= int(numbers.max()) <= MAX_INTEGER:
        raise WireError(f"An integer buffer contains a value beyond ±{MAX_INTEGER}.")
