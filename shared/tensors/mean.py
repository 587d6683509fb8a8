"""Sums and means of tensors that are bitwise independent of the order of their terms.

A float64 sum of float32 numbers is rounded, and the rounding depends on the order. Here each term is cut into slices on
fixed grids, 30 bits apart, and each slice is added to its own float64 accumulator. A slice has at most 30 significant
bits and float64 has 53, so the accumulators are exact for up to four million terms. A network's weights usually need
two or three accumulators; more are created when the values require them.
"""

import math

import torch
from torch import Tensor

from shared.contract.errors import WireError
from shared.contract.limits import MAX_ABSOLUTE, MAX_INTEGER, MAX_WEIGHT
from shared.tensors.names import Tensors

BITS_PER_SLICE = 30
_INTEGER_LOW_BITS = 20
_BLOCK = 1 << 20  # elements processed at a time, to keep temporaries small compared to the model


class ExactSum:
    """An exact sum of tensors of the same size."""

    def __init__(self, elements: int) -> None:
        self.elements = elements
        self.slices: dict[int, Tensor] = {}

    def add(self, values: Tensor, factor: float = 1.0) -> None:
        """Add `values * factor`, computed in float64."""
        flat = values.detach().reshape(-1)
        for start in range(0, self.elements, _BLOCK):
            end = min(start + _BLOCK, self.elements)
            self._add_block(start, end, flat[start:end].to(torch.float64) * factor)

    def _add_block(self, start: int, end: int, rest: Tensor) -> None:
        peak = float(rest.abs().max())
        if not peak < MAX_ABSOLUTE:
            raise WireError("A tensor contains a value that is not finite or is too large to average.")
        level = math.frexp(peak)[1] // BITS_PER_SLICE
        while bool(rest.any()):
            part = _round_to_grid(rest, level)
            rest.sub_(part)
            if level not in self.slices:
                self.slices[level] = torch.zeros(self.elements, dtype=torch.float64)
            self.slices[level][start:end].add_(part)
            level -= 1

    def total(self) -> Tensor:
        """Return the sum as a flat float64 tensor, within 2 ulp of the exact sum and independent of the order."""
        total = torch.zeros(self.elements, dtype=torch.float64)
        for start in range(0, self.elements, _BLOCK):
            self._total_block(start, total[start : start + _BLOCK])
        return total

    def _total_block(self, start: int, total: Tensor) -> None:
        # Accumulators may overlap and cancel, and adding them directly would round away what is left. So each level's
        # overflow is first carried to the next level, exactly, as in long addition.
        carry = torch.zeros_like(total)
        level, top = min(self.slices, default=0), max(self.slices, default=-1)
        while level <= top or bool(carry.any()):
            if level in self.slices:
                carry += self.slices[level][start : start + len(total)]
            digit, carry = carry, _round_to_grid(carry, level + 1)
            total += digit.sub_(carry)
            level += 1


def _round_to_grid(values: Tensor, level: int) -> Tensor:
    # Adding and subtracting a number this large rounds to a multiple of 2**(30*level).
    magnet = 1.5 * 2.0 ** (BITS_PER_SLICE * level + 52)
    return (values + magnet).sub_(magnet)


class RunningMean:
    """The weighted mean of sets of named tensors, added one at a time; needs memory for one model, not for N.

    Floating-point tensors are averaged exactly and rounded once, to their own dtype. Integer and boolean buffers (such
    as BatchNorm's counters) become the rounded mean in their own dtype.
    """

    def __init__(self) -> None:
        self.weight = 0
        self.terms = 0
        self._shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._sums: dict[str, ExactSum] = {}

    def add(self, tensors: Tensors, weight: int = 1) -> None:
        """Add one set, which must have the names, shapes and dtypes of the first."""
        if not 1 <= weight <= MAX_WEIGHT:
            raise WireError(f"The weight {weight} is outside 1 … {MAX_WEIGHT}.")
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        if not self.terms:
            self._shapes = shapes
            self._sums = {name: ExactSum(tensor.numel()) for name, tensor in tensors.items()}
        elif shapes != self._shapes:
            raise WireError("The sets of tensors to average differ in names, shapes or dtypes.")
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                self._sums[name].add(tensor, weight)
            else:
                self._add_integers(self._sums[name], tensor.to(torch.int64), weight)
        self.weight += weight
        self.terms += 1

    @staticmethod
    def _add_integers(total: ExactSum, values: Tensor, weight: int) -> None:
        if values.numel() and not -MAX_INTEGER <= int(values.min()) <= int(values.max()) <= MAX_INTEGER:
            raise WireError(f"An integer buffer contains a value beyond ±{MAX_INTEGER}.")
        high = values >> _INTEGER_LOW_BITS  # in two parts, so that weight × part is exact in float64
        total.add(high, float(weight) * 2**_INTEGER_LOW_BITS)
        total.add(values - (high << _INTEGER_LOW_BITS), weight)

    def result(self) -> Tensors:
        """Return the mean of the sets added so far."""
        if not self.terms:
            raise ValueError("nothing has been added to the mean")
        means: Tensors = {}
        for name, (shape, dtype) in self._shapes.items():
            mean = self._sums[name].total().div_(self.weight)
            if dtype == torch.bool:
                mean = mean > 0.5
            elif not dtype.is_floating_point:
                mean = mean.round_()
            means[name] = mean.to(dtype).reshape(shape)
        return means
