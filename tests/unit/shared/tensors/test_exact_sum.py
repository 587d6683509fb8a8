"""Exact sums against Python's fractions, which are exact too."""

import itertools
import math
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from shared.contract.errors import WireError
from shared.contract.limits import MAX_ABSOLUTE, MAX_WEIGHT
from shared.tensors import exact_sum
from shared.tensors.exact_sum import ExactSum

TINY, HUGE = 2.0**-149, 2.0**128 - 2.0**104  # the least and the largest float32
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

float32s = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from(
    [TINY, -TINY, HUGE, -HUGE, 0.0, -0.0, 1.0, 2.0**30, -(2.0**29), 2.0**-30, 1 + 2.0**-23]
)
float16s = st.floats(width=16, allow_nan=False, allow_infinity=False)
float64s = st.floats(-MAX_ABSOLUTE / 2, MAX_ABSOLUTE / 2)
light_float64s = st.floats(-MAX_ABSOLUTE / MAX_WEIGHT / 2, MAX_ABSOLUTE / MAX_WEIGHT / 2)  # can have any weight
bfloat16s = float32s.filter(lambda value: abs(value) < 2.0**127)  # rounding up must not end in infinity
weights = st.integers(1, 100) | st.sampled_from([1, MAX_WEIGHT, MAX_WEIGHT - 1])


@st.composite
def rows(draw: st.DrawFn, numbers: st.SearchStrategy[float], dtype: torch.dtype) -> list[Tensor]:
    """Terms of one length; some stand several times, and some again with the other sign."""
    length = draw(st.integers(1, 4))
    row = st.lists(numbers, min_size=length, max_size=length).map(lambda values: torch.tensor(values, dtype=dtype))
    terms = draw(st.lists(row, min_size=1, max_size=8))
    repeated = draw(st.lists(st.tuples(st.sampled_from(terms), st.integers(1, 20)), max_size=2))
    negated = draw(st.lists(st.sampled_from(terms), max_size=4))
    return terms + [term for term, times in repeated for _ in range(times)] + [-term for term in negated]


float32_rows = rows(float32s, torch.float32)
float64_rows = rows(float64s, torch.float64)
light_rows = (
    float32_rows | rows(light_float64s, torch.float64) | rows(float16s, torch.float16) | rows(bfloat16s, torch.bfloat16)
)


def add_all(terms: list[Tensor], factors: list[int] | None = None) -> ExactSum:
    total = ExactSum(terms[0].numel())
    for term, factor in zip(terms, factors or [1] * len(terms), strict=True):
        total.add(term, factor)
    return total


def same_bits(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def column(*values: float) -> list[Tensor]:
    return [torch.tensor([value], dtype=torch.float32) for value in values]


class TestExactSum:
    @given(float32_rows | float64_rows, st.randoms(use_true_random=False))
    def test_total_does_not_depend_on_the_order(self, terms: list[Tensor], random: Any) -> None:
        shuffled = random.sample(terms, len(terms))
        assert same_bits(add_all(shuffled).total(), add_all(terms).total())

    @given(light_rows, st.data())
    def test_weighted_total_does_not_depend_on_the_order(self, terms: list[Tensor], data: st.DataObject) -> None:
        factors = data.draw(st.lists(weights, min_size=len(terms), max_size=len(terms)))
        order = data.draw(st.permutations(range(len(terms))))
        shuffled = add_all([terms[index] for index in order], [factors[index] for index in order])
        assert same_bits(shuffled.total(), add_all(terms, factors).total())

    @given(float32_rows | float64_rows)
    @example(column(2.0**30, *[-(2.0**28)] * 4, 2.0**-30))
    @example(column(HUGE, 1.0, -HUGE, TINY, -1.0))
    def test_total_is_exact(self, terms: list[Tensor]) -> None:
        """Exact but for the rounding to float64, however much of the sum cancels."""
        total = add_all(terms).total()
        for index, found in enumerate(total.tolist()):
            values = [float(term[index]) for term in terms]
            assert abs(Fraction(found) - sum(map(Fraction, values))) <= 2 * Fraction(math.ulp(found))
            assert abs(found - math.fsum(values)) <= 2 * math.ulp(found)

    @given(light_rows, st.data())
    def test_weighted_total_is_the_exact_sum_rounded_once(self, terms: list[Tensor], data: st.DataObject) -> None:
        factors = data.draw(st.lists(weights, min_size=len(terms), max_size=len(terms)))
        for index, found in enumerate(add_all(terms, factors).total().tolist()):
            exact = sum(Fraction(float(term[index])) * factor for term, factor in zip(terms, factors, strict=True))
            assert found == float(exact)

    @given(float32_rows | float64_rows)
    def test_total_is_that_of_fsum(self, terms: list[Tensor]) -> None:
        expected = [math.fsum(float(term[index]) for term in terms) for index in range(terms[0].numel())]
        assert add_all(terms).total().tolist() == expected

    @given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6), st.integers(-40, 60))
    def test_few_small_values_among_large_ones_are_summed_exactly(self, seeds: list[int], scale: int) -> None:
        """As in most layers: a handful of values are far below the others."""
        terms = []
        for seed in seeds:
            chance = np.random.default_rng(seed)
            values = chance.uniform(1, 2, 200).astype(np.float32) * np.float32(2.0**scale)
            values[chance.choice(200, 5)] *= 2.0 ** -chance.integers(0, 80, 5)
            values[chance.choice(200, 5)] = 0
            terms.append(torch.from_numpy(values))
        for order in (terms, terms[::-1]):
            found = add_all(order).total()
            assert found.tolist() == [math.fsum(column) for column in torch.stack(terms).T.tolist()]

    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            ((1.0, 2.0**-53), 1.0),  # a tie, to even
            ((1.0, 2.0**-53, TINY), 1.0 + 2.0**-52),  # just beyond the tie
            ((1.0, 2.0**-53, -TINY), 1.0),
            ((1.0 + 2.0**-23, 2.0**-52, 2.0**-53), 1.0 + 2.0**-23 + 2.0**-51),  # a tie, up to even
            ((1.0 + 2.0**-23, 2.0**-52, 2.0**-53, -TINY), 1.0 + 2.0**-23 + 2.0**-52),
            ((1.0, -(2.0**-54)), 1.0),  # below a power of two numbers are twice as dense
            ((1.0, -(2.0**-54), -TINY), 1.0 - 2.0**-53),
            ((2.0**127, 2.0**127, -(2.0**100)), 2.0**128 - 2.0**100),
        ],
    )
    def test_rounding_looks_at_every_bit(self, values: tuple[float, ...], expected: float) -> None:
        for order in itertools.permutations(values):
            assert add_all(column(*order)).total().tolist() == [expected]
            assert add_all(column(*(-value for value in order))).total().tolist() == [-expected]

    def test_full_limbs_carry(self) -> None:
        """The largest weight fills a limb with one term."""
        total = ExactSum(2)
        for _ in range(1000):
            total.add(torch.tensor([1.0, -TINY]), MAX_WEIGHT - 1)
        total.add(torch.tensor([TINY, 1.0]))
        assert total.total().tolist() == [1000.0 * (MAX_WEIGHT - 1), 1.0]
        total.add(torch.tensor([0.0, -1.0]))
        assert total.total().tolist()[1] == -1000.0 * (MAX_WEIGHT - 1) * TINY

    @given(float32s, weights)
    def test_factor_times_float32_is_exact(self, value: float, weight: int) -> None:
        total = add_all(column(value), [weight]).total()
        assert Fraction(total.item()) == Fraction(value) * weight

    @given(st.lists(float32s, min_size=1, max_size=10))
    def test_opposite_terms_cancel_exactly(self, values: list[float]) -> None:
        terms = column(*values, *(-value for value in reversed(values)))
        assert same_bits(add_all(terms).total(), np.zeros(1))

    @given(float32_rows, st.integers(1, 3))
    def test_total_does_not_depend_on_the_block_size(self, terms: list[Tensor], block: int) -> None:
        whole = add_all(terms).total()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exact_sum, "_BLOCK", block)
            assert same_bits(add_all(terms).total(), whole)

    def test_empty_sum_is_zero(self) -> None:
        assert ExactSum(3).total().tolist() == [0, 0, 0]

    def test_empty_tensors_sum_to_an_empty_total(self) -> None:
        assert add_all([torch.zeros(0, 4)]).total().shape == (0,)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, MAX_ABSOLUTE])
    def test_values_that_cannot_be_summed_are_rejected(self, bad: float) -> None:
        with pytest.raises(WireError, match="not finite or is too large"):
            ExactSum(2).add(torch.tensor([1.0, bad], dtype=torch.float64))

    def test_terms_are_not_modified(self) -> None:
        for dtype in FLOATS:
            term = torch.tensor([1.5, -2.5], dtype=dtype)
            ExactSum(2).add(term)
            assert term.tolist() == [1.5, -2.5]

    def test_values_out_of_order_in_memory_are_summed(self) -> None:
        total = ExactSum(6)
        total.add(torch.arange(6.0).reshape(2, 3).T)
        assert total.total().tolist() == [0, 3, 1, 4, 2, 5]


class TestCost:
    @pytest.mark.parametrize(("dtype", "limbs"), [(torch.float32, 9), (torch.bfloat16, 9), (torch.float16, 4)])
    def test_number_of_limbs_is_bounded(self, dtype: torch.dtype, limbs: int) -> None:
        """However the exponents change from term to term, and whatever their order."""
        info = torch.finfo(dtype)
        least, greatest = math.frexp(info.smallest_normal * info.eps)[1] - 1, math.frexp(info.max)[1]
        exponents = range(least, greatest, 7)
        for order in (exponents, exponents[::-1]):
            total = ExactSum(1)
            for exponent in order:
                for weight in (1, MAX_WEIGHT - 1):
                    total.add(torch.tensor([2.0**exponent]).to(dtype), weight)
            assert total.size_bytes <= limbs * 8

    @pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
    def test_no_threads_are_started(self) -> None:
        """torch's would wait for each other; numpy computes in the calling thread."""
        program = """
import os, torch
from shared.tensors.mean import RunningMean
torch.set_num_threads(4)
dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.int64)
tensors = {str(dtype): torch.frombuffer(bytearray(2_400_000), dtype=dtype) for dtype in dtypes}
def threads(): return len(os.listdir("/proc/self/task"))
before, mean = threads(), RunningMean()
mean.add(tensors, 3)
mean.result()
print(threads() - before)
tensors["torch.float32"].add(1)
print(threads() - before)
"""
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        by_mean, by_torch = map(int, done.stdout.split())
        assert by_mean == 0
        assert by_torch > 0
