"""Exact sums of tensors, correctly rounded, so that neither the order of the terms nor their grouping changes a bit.

A float64 sum is rounded at every step, and the rounding depends on the order. Here a sum is a fixed-point number: an
int64 per element counts multiples of 2**grid, with a grid for each block of elements. The first term sets the grid so
that the values of ordinary weights are whole multiples of it. Bits below the grid, of values far smaller than the
block's largest, go to another limb, whose grid is 46 bits finer; bits of values that are much larger go to a coarser
one. Integer additions are exact, and the total is rounded once.

The work is done by numpy, in the calling thread. torch would split large tensors among its threads, and on a busy
machine these burn many times the work's CPU time waiting for each other.
"""

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shared.contract.errors import WireError
from shared.contract.limits import MAX_ABSOLUTE
from shared.tensors.arrays import Array, as_array

if TYPE_CHECKING:
    from torch import Tensor

Floats = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Doubles = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]

# Elements. A block, its sum and the scratch arrays fit in a core's cache. From 32 × 1024 on, torch would use threads.
_BLOCK = 30 * 1024
_LIMB_BITS = 46  # between the grids of neighboring limbs
_FIRST_BITS = 46  # of the first term's largest value; leaves the weights 16 of the limb's 62 bits
_TERM_BITS = 50  # of any term in a limb; up to 51 fit in a float64 beside the magnet
_MAX_LIMB_BITS = 62
_DIGIT_BITS = 16  # of a factor; with the 45 bits of the largest rest they stay in a limb
_FACTOR_DIGIT = 1 << _DIGIT_BITS
_MAX_LAST_DIGIT = 1 << 52  # exact in float64, even with a carry
_ALL_BITS = (1 << 64) - 1
_FINEST_GRID = -1074  # every float64 is a multiple of 2**-1074
_SPARSE = 8  # indexing costs about this many times as much per element as whole arrays
_SIGNIFICANT_BITS = {"float32": 24, "float16": 11, "bfloat16": 8}


class Scratch:
    """Arrays for temporary results. Sums that are not added to at the same time can share them."""

    def __init__(self) -> None:
        self.narrow = np.empty(_BLOCK, np.float32)
        self.terms, self.rounded, self.rest = np.empty(_BLOCK), np.empty(_BLOCK), np.empty(_BLOCK)
        self.flags = np.empty(_BLOCK, np.bool_)


class ExactSum:
    """An exact sum of tensors of the same size.

    Takes 8 bytes per element and limb: one limb for all elements, another for blocks with values less than 2**-22 times
    the largest, and another when the factors add up to more than 2**16. The range of float32 and narrower types, with
    weights, has room for nine limbs, that of float64 for 45.
    """

    def __init__(self, elements: int, scratch: Scratch | None = None) -> None:
        self.elements = elements
        self._scratch = scratch or Scratch()
        first = np.zeros(elements, np.int64)  # in one piece, so that the system can use large pages
        self._blocks = [_Block(first[start : start + _BLOCK]) for start in range(0, elements, _BLOCK)]

    @property
    def size_bytes(self) -> int:
        """Memory of the limbs."""
        return sum(limb.units.nbytes for block in self._blocks for limb in block.limbs.values())

    def add(self, values: "Tensor | Array", factor: int = 1) -> None:
        """Add `values * factor` exactly; the factor is at least 1."""
        flat = as_array(values).reshape(-1)
        bits = _SIGNIFICANT_BITS.get(flat.dtype.name)
        start = 0
        for block in self._blocks:
            part = _as_floats(flat[start : start + block.size], self._scratch)
            block.add(part, factor, bits, self._scratch)
            start += block.size

    def totals(self) -> Iterator[tuple[slice, Doubles]]:
        """Yield slices of the elements with their sums, correctly rounded to float64."""
        start = 0
        for block in self._blocks:
            yield slice(start, start + block.size), block.total()
            start += block.size

    def total(self) -> Doubles:
        """Return the sum as a flat array, correctly rounded."""
        total = np.empty(self.elements)
        for where, part in self.totals():
            total[where] = part
        return total


def _as_floats(numbers: Array, scratch: Scratch) -> Floats:
    """Return the numbers as float32 or float64, whichever is exact."""
    if numbers.dtype == np.float32:
        return numbers
    narrow = scratch.narrow[: numbers.size]
    if numbers.dtype.name == "bfloat16":  # the upper half of a float32
        np.left_shift(numbers.view(np.int16), 16, out=narrow.view(np.int32), dtype=np.int32)
        return narrow
    if numbers.dtype == np.float16:
        np.copyto(narrow, numbers)
        return narrow
    return numbers.astype(np.float64, copy=False)


class _Limb:
    """Multiples of 2**grid, and a bound of their absolute values."""

    def __init__(self, grid: int, units: Integers) -> None:
        self.grid = grid
        self.units = units
        self.bound = 0
        self.magnet = math.ldexp(1.5, 52 + grid)  # adding it rounds to the grid; the units are then in the low bits
        self.magnet_bits = int(np.float64(self.magnet).view(np.int64))
        self._excess = 0

    def add(self, terms: Doubles, digit: int, where: Indices | None) -> None:
        """Add terms, which contain the magnet, times a digit; destroy the terms."""
        units = terms.view(np.int64)
        if where is not None:
            self.units[where] += (units - self.magnet_bits) * digit
            return
        if digit != 1:
            units *= digit
        self.units += units
        # Overflow wraps around, so the bits of all the magnets can be taken away together.
        self._excess += digit * self.magnet_bits

    def settle(self) -> Integers:
        """Return the units, without the bits of magnets."""
        if self._excess:
            self.units -= np.array(self._excess & _ALL_BITS, np.uint64).view(np.int64)
            self._excess = 0
        return self.units


class _Block:
    """The sum of a block of elements: limbs by level, each 46 bits coarser than the one below."""

    def __init__(self, first_units: Integers) -> None:
        self.size = first_units.size
        self.limbs: dict[int, _Limb] = {}
        self._first_units = first_units
        self._first_grid = 0

    def add(self, values: Floats, factor: int, significant_bits: int | None, scratch: Scratch) -> None:
        """Add values × factor. Values without a number of significant bits may have any float64's."""
        magnitudes = np.abs(values, out=scratch.terms.view(values.dtype)[: self.size])
        peak = float(np.maximum.reduce(magnitudes))
        if not peak * factor < MAX_ABSOLUTE:  # NaN is not less either
            raise WireError("A tensor contains a value that is not finite or is too large to average.")
        if peak == 0:
            return
        exponent = math.frexp(peak)[1]
        if not self.limbs:
            self._first_grid = max(exponent - _FIRST_BITS, _FINEST_GRID)
            self.limbs[0] = _Limb(self._first_grid, self._first_units)
        finest = _FINEST_GRID  # all values are multiples of 2**finest
        if significant_bits is not None:
            least = float(np.minimum.reduce(magnitudes))
            finest = math.frexp(least)[1] - significant_bits if least else _FINEST_GRID
        if factor < _FACTOR_DIGIT:
            self._add_digit(values, exponent, finest, factor, scratch)
            return
        for shift in range(0, factor.bit_length(), _DIGIT_BITS):
            digit = (factor >> shift) % _FACTOR_DIGIT
            if digit:
                scaled = np.multiply(values, 2.0**shift, dtype=np.float64)
                self._add_digit(scaled, exponent + shift, finest + shift, digit, scratch)

    def _add_digit(self, values: Floats, exponent: int, finest: int, digit: int, scratch: Scratch) -> None:
        """Add values × digit. The values are less than 2**exponent, and multiples of 2**finest."""
        needed = max(exponent - _TERM_BITS, exponent + digit.bit_length() - _MAX_LIMB_BITS, _FINEST_GRID)
        level = -((self._first_grid - needed) // _LIMB_BITS)
        where: Indices | None = None
        while True:
            limb = self._limb(level)
            self._make_room(level, digit << max(exponent - limb.grid, 0))
            terms = scratch.terms[: values.size]
            terms[:] = values  # faster than a sum that converts
            terms += limb.magnet
            if finest >= limb.grid:
                limb.add(terms, digit, where)
                return
            rest = scratch.rest[: values.size]
            rounded = np.subtract(terms, limb.magnet, out=scratch.rounded[: values.size])
            np.subtract(values, rounded, out=rest, dtype=np.float64)
            limb.add(terms, digit, where)
            found = np.flatnonzero(np.not_equal(rest, 0, out=scratch.flags[: rest.size]))
            if found.size == 0:
                return
            values = rest
            if found.size * _SPARSE < rest.size:
                values, where = rest[found], found if where is None else where[found]
            exponent = limb.grid  # the rest is at most half of the grid
            level -= 1

    def _limb(self, level: int) -> _Limb:
        if level not in self.limbs:
            self.limbs[level] = _Limb(self._grid(level), np.zeros(self.size, np.int64))
        return self.limbs[level]

    def _grid(self, level: int) -> int:
        return max(self._first_grid + _LIMB_BITS * level, _FINEST_GRID)

    def _make_room(self, level: int, units: int) -> None:
        """Make room for this many units in a limb; if needed, move its upper bits to the next one."""
        limb = self.limbs[level]
        if limb.bound + units > 1 << _MAX_LIMB_BITS:
            above = self._limb(level + 1)
            shift = above.grid - limb.grid
            self._make_room(level + 1, (limb.bound >> shift) + 1)
            above.units += _split(limb.settle(), shift)
            limb.bound = 1 << (shift - 1)
        limb.bound += units

    def total(self) -> Doubles:
        """Return the sum, correctly rounded."""
        if not self.limbs:
            return np.zeros(self.size)
        low, top = min(self.limbs), max(self.limbs)
        if low == top:
            return _doubles(self.limbs[low].settle(), self.limbs[low].grid)
        digits: list[Doubles] = []
        carry = np.zeros(self.size, np.int64)
        for level in itertools.count(low):
            limb = self.limbs.get(level)
            units = carry if limb is None else carry + limb.settle()
            is_last = level > top or (level == top and limb is not None and limb.bound <= _MAX_LAST_DIGIT)
            carry = carry if is_last else _split(units, self._grid(level + 1) - self._grid(level))
            digits.append(_doubles(units, self._grid(level)))
            if is_last:
                break
        return _rounded_sum(digits)


def _doubles(units: Integers, grid: int) -> Doubles:
    return units.astype(np.float64) * math.ldexp(1.0, grid)


def _split(units: Integers, shift: int) -> Integers:
    """Reduce the numbers to at most half of 2**shift, in place; return the multiples of 2**shift taken away."""
    upper = (units + (1 << (shift - 1))) >> shift
    units -= upper << shift
    return upper


def _rounded_sum(digits: list[Doubles]) -> Doubles:
    """Return the correctly rounded sum of digits, from the lowest, each at most half of the next one's unit."""
    if len(digits) == 2:
        return digits[0] + digits[1]
    high = digits[-1]
    low = tail = np.zeros_like(high)
    for digit in reversed(digits[:-1]):
        # Exactly high + digit = total + error. Once there is an error, only the sign of what follows matters.
        total = high + digit
        error = digit - (total - high)
        is_exact = low == 0
        tail = np.where(is_exact | (tail != 0), tail, digit)
        high, low = np.where(is_exact, total, high), np.where(is_exact, error, low)
    # `high` rounds high + low to nearest. If that was a tie, the tail decides it, as in CPython's math.fsum.
    other = high + 2 * low
    is_tie = (low != 0) & (other - high == 2 * low)
    is_beyond = (tail != 0) & ((tail > 0) == (low > 0))
    return np.where(is_tie & is_beyond, other, high)
