"""Sums and means of tensors that do not depend on the order in which the terms arrive, to the bit.

A float64 sum of float32 numbers is rounded, and the rounding depends on the order. Here each term is cut into slices
that lie on fixed grids, 30 bits apart, and each slice is added in its own float64 accumulator. A slice has at most 30
significant bits and float64 has 53, so that the accumulators are exact for up to four million terms. Weights of a
network usually need two or three accumulators; more are made when the numbers ask for them.
"""

import math

import torch
from torch import Tensor

from shared.limits import MAX_ABSOLUTE, MAX_INTEGER, MAX_WEIGHT
from shared.problems import WireError

BITS_PER_SLICE = 30
_INTEGER_LOW_BITS = 20
_BLOCK = 1 << 20  # elements handled at a time: the temporaries stay small beside the model

Tensors = dict[str, Tensor]


class ExactSum:
    """The exact sum of tensors of one shape."""

    def __init__(self, elements: int) -> None:
        self.elements = elements
        self.slices: dict[int, Tensor] = {}

    def add(self, values: Tensor, factor: float = 1.0) -> None:
        """Add `values * factor`; the product is formed in float64."""
        flat = values.detach().reshape(-1)
        for start in range(0, self.elements, _BLOCK):
            end = min(start + _BLOCK, self.elements)
            self._add_block(start, end, flat[start:end].to(torch.float64) * factor)

    def _add_block(self, start: int, end: int, rest: Tensor) -> None:
        peak = float(rest.abs().max())
        if not peak < MAX_ABSOLUTE:
            raise WireError("A tensor holds a value that is not finite or is too large to be averaged.")
        level = math.frexp(peak)[1] // BITS_PER_SLICE
        while bool(rest.any()):
            part = _round_to_grid(rest, level)
            rest.sub_(part)
            if level not in self.slices:
                self.slices[level] = torch.zeros(self.elements, dtype=torch.float64)
            self.slices[level][start:end].add_(part)
            level -= 1

    def total(self) -> Tensor:
        """The sum as a flat float64 tensor, a function of the set of terms alone, within 2 ulp of the exact sum."""
        total = torch.zeros(self.elements, dtype=torch.float64)
        for start in range(0, self.elements, _BLOCK):
            self._total_block(start, total[start : start + _BLOCK])
        return total

    def _total_block(self, start: int, total: Tensor) -> None:
        # Accumulators may overlap and cancel each other, and adding them as they are would then round away what is
        # left. So what is too large for a level is first carried to the next one, exactly, as in a sum on paper.
        carry = torch.zeros_like(total)
        level, top = min(self.slices, default=0), max(self.slices, default=-1)
        while level <= top or bool(carry.any()):
            if level in self.slices:
                carry += self.slices[level][start : start + len(total)]
            digit, carry = carry, _round_to_grid(carry, level + 1)
            total += digit.sub_(carry)
            level += 1


def _round_to_grid(values: Tensor, level: int) -> Tensor:
    # Adding and taking away a number this large rounds to a multiple of 2**(30*level).
    magnet = 1.5 * 2.0 ** (BITS_PER_SLICE * level + 52)
    return (values + magnet).sub_(magnet)


class RunningMean:
    """The weighted mean of sets of named tensors, added one set at a time; memory for one model, not for N.

    Floating tensors are averaged exactly and rounded once, to their own dtype. Integer and boolean buffers (such as
    BatchNorm's counters) become the rounded mean in their own dtype.
    """

    def __init__(self) -> None:
        self.weight = 0
        self.terms = 0
        self._shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._sums: dict[str, ExactSum] = {}

    def add(self, tensors: Tensors, weight: int = 1) -> None:
        """Add one set; every set must have the names, shapes and dtypes of the first."""
        if not 1 <= weight <= MAX_WEIGHT:
            raise WireError(f"A weight of {weight} is outside 1 … {MAX_WEIGHT}.")
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        if not self.terms:
            self._shapes = shapes
            self._sums = {name: ExactSum(tensor.numel()) for name, tensor in tensors.items()}
        elif shapes != self._shapes:
            raise WireError("The sets of tensors to be averaged differ in their names, shapes or dtypes.")
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
            raise WireError(f"An integer buffer holds a value beyond ±{MAX_INTEGER}.")
        high = values >> _INTEGER_LOW_BITS  # two parts, so that weight × part is exact in float64
        total.add(high, float(weight) * 2**_INTEGER_LOW_BITS)
        total.add(values - (high << _INTEGER_LOW_BITS), weight)

    def result(self) -> Tensors:
        """The mean of everything added so far."""
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

    def state(self) -> Tensors:
        """Everything needed to go on later, as named tensors; see `restore`."""
        state = {"weight": torch.tensor([self.weight, self.terms])}
        for name, total in self._sums.items():
            for level, values in total.slices.items():
                state[f"slice.{level}.{name}"] = values
        return state

    @classmethod
    def restore(cls, state: Tensors, like: Tensors) -> "RunningMean":
        """The mean whose `state()` this is, over tensors of the names, shapes and dtypes of `like`."""
        mean = cls()
        mean.weight, mean.terms = (int(value) for value in state["weight"])
        mean._shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in like.items()}
        mean._sums = {name: ExactSum(tensor.numel()) for name, tensor in like.items()}
        for key, values in state.items():
            if key.startswith("slice."):
                _, level, name = key.split(".", 2)
                mean._sums[name].slices[int(level)] = values.clone()
        return mean
