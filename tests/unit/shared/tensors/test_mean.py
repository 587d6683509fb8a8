import math
import weakref
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared.contract.errors import WireError
from shared.contract.limits import MAX_INTEGER, MAX_WEIGHT
from shared.tensors.arrays import as_tensors
from shared.tensors.mean import RunningMean
from shared.tensors.wire import encode

TINY, HUGE = 2.0**-149, 2.0**128 - 2.0**104  # the least and the largest float32
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

float32s = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from(
    [TINY, -TINY, HUGE, -HUGE, 0.0, -0.0, 1.0, 2.0**30, -(2.0**29), 2.0**-30, 1 + 2.0**-23]
)
weights = st.integers(1, 100) | st.sampled_from([1, MAX_WEIGHT, MAX_WEIGHT - 1])


def same_bits(left: Tensor, right: Tensor) -> bool:
    same_kind = left.dtype == right.dtype and left.shape == right.shape
    return same_kind and left.numpy(force=True).tobytes() == right.numpy(force=True).tobytes()


def mean_of(sets: list[dict[str, Tensor]], counts: list[int] | None = None) -> dict[str, Tensor]:
    mean = RunningMean()
    for tensors, weight in zip(sets, counts or [1] * len(sets), strict=True):
        mean.add(tensors, weight)
    return as_tensors(mean.result())


@st.composite
def updates(draw: st.DrawFn) -> tuple[list[dict[str, Tensor]], list[int]]:
    """Sets as networks have them, with weights."""
    number = draw(st.integers(1, 8))
    sets = []
    for _ in range(number):
        values = draw(st.lists(float32s, min_size=6, max_size=6))
        small = draw(st.lists(st.floats(-100, 100), min_size=2, max_size=2))
        counter, flag = draw(st.integers(-MAX_INTEGER, MAX_INTEGER)), draw(st.booleans())
        sets.append(
            {
                "bn.1.weight": torch.tensor(values).reshape(2, 3),
                "half": torch.tensor(small, dtype=torch.float16),
                "brain": torch.tensor(small, dtype=torch.bfloat16),
                "double": torch.tensor(small, dtype=torch.float64),
                "bn.num_batches_tracked": torch.tensor(counter),
                "small": torch.tensor([counter % 100], dtype=torch.int32),
                "flag": torch.tensor([flag]),
                "nothing": torch.zeros(0, 3),
            }
        )
    return sets, draw(st.lists(weights, min_size=number, max_size=number))


class TestRunningMean:
    def test_weighted_mean_of_one_and_three_is_two_and_a_half(self) -> None:
        sets = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}]
        assert mean_of(sets, [1, 3])["w"].tolist() == [2.5]
        assert mean_of(sets)["w"].tolist() == [2.0]

    @settings(max_examples=50)
    @given(updates(), st.integers(1, 12), weights)
    def test_mean_of_identical_sets_is_that_set(
        self, drawn: tuple[list[dict[str, Tensor]], list[int]], number: int, weight: int
    ) -> None:
        one = drawn[0][0]
        mean = mean_of([one] * number, [weight] * number)
        assert mean.keys() == one.keys()
        for name, expected in one.items():
            if name == "double":  # weight × value is itself rounded in float64
                assert mean[name].tolist() == pytest.approx(expected.tolist(), rel=4e-16, abs=0)
            elif name == "brain":
                assert same_bits(mean[name].view(torch.int16), (expected + 0.0).view(torch.int16))
            else:  # a sum that starts from zero has no negative zeros
                assert same_bits(mean[name], expected if name == "flag" else expected + 0)

    @settings(max_examples=50)
    @given(updates(), st.data())
    def test_mean_does_not_depend_on_the_order(
        self, drawn: tuple[list[dict[str, Tensor]], list[int]], data: st.DataObject
    ) -> None:
        sets, counts = drawn
        order = data.draw(st.permutations(range(len(sets))))
        forward, shuffled = mean_of(sets, counts), mean_of([sets[i] for i in order], [counts[i] for i in order])
        assert encode(shuffled) == encode(forward)

    @settings(max_examples=50)
    @given(updates())
    def test_float32_mean_is_the_exact_mean_rounded_once(
        self, drawn: tuple[list[dict[str, Tensor]], list[int]]
    ) -> None:
        sets, counts = drawn
        found = mean_of(sets, counts)["bn.1.weight"].flatten().tolist()
        for index, value in enumerate(found):
            terms = [Fraction(float(tensors["bn.1.weight"].flatten()[index])) for tensors in sets]
            exact = sum(term * count for term, count in zip(terms, counts, strict=True)) / sum(counts)
            ulp = max(Fraction(2) ** (math.frexp(value)[1] - 24), Fraction(TINY))
            assert abs(Fraction(value) - exact) <= ulp * Fraction(51, 100)

    @given(st.lists(st.tuples(st.integers(-MAX_INTEGER, MAX_INTEGER), st.integers(1, 100)), min_size=1, max_size=9))
    def test_integer_mean_is_the_exact_mean_rounded(self, terms: list[tuple[int, int]]) -> None:
        found = mean_of([{"n": torch.tensor(value)} for value, _ in terms], [count for _, count in terms])["n"]
        exact = Fraction(sum(value * count for value, count in terms), sum(count for _, count in terms))
        assert found.dtype == torch.int64
        assert int(found) == round(exact)

    @pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
    @pytest.mark.parametrize("shape", [(), (2, 3), (0, 3)], ids=str)
    def test_mean_preserves_dtype_and_shape(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        sets = [{"w": torch.full(shape, value, dtype=dtype)} for value in (0, 1, 1)]
        mean = mean_of(sets)["w"]
        assert (mean.dtype, mean.shape) == (dtype, shape)
        expected = {True: torch.tensor(2 / 3, dtype=dtype), False: torch.tensor(1)}[dtype.is_floating_point]
        assert bool((mean == expected).all())

    @pytest.mark.parametrize(
        ("values", "mean"), [((156, 157), 156), ((157, 158), 158), ((1, 1, 2), 1), ((1, 2, 2), 2), ((-1, -2), -2)]
    )
    def test_mean_of_counters_is_an_integer(self, values: tuple[int, ...], mean: int) -> None:
        found = mean_of([{"num_batches_tracked": torch.tensor(value)} for value in values])["num_batches_tracked"]
        assert found.dtype == torch.int64
        assert found.tolist() == mean

    @pytest.mark.parametrize(("votes", "mean"), [((1, 0), False), ((1, 1, 0), True), ((0,), False), ((1,), True)])
    def test_mean_of_flags_is_the_majority(self, votes: tuple[int, ...], mean: bool) -> None:
        assert mean_of([{"flag": torch.tensor(bool(vote))} for vote in votes])["flag"].tolist() is mean

    @pytest.mark.parametrize("weight", [0, -1, MAX_WEIGHT + 1])
    def test_weight_out_of_range_is_rejected(self, weight: int) -> None:
        mean = RunningMean()
        with pytest.raises(WireError, match=f"The weight {weight} is outside 1 … {MAX_WEIGHT}"):
            mean.add({"w": torch.ones(1)}, weight)
        assert mean.terms == 0

    @pytest.mark.parametrize(
        "other",
        [
            {},
            {"v": torch.ones(2)},
            {"w": torch.ones(3)},
            {"w": torch.ones(2, 1)},
            {"w": torch.ones(2, dtype=torch.float64)},
            {"w": torch.ones(2, dtype=torch.int64)},
            {"w": torch.ones(2), "v": torch.ones(2)},
        ],
        ids=["none", "name", "size", "rank", "precision", "kind", "more"],
    )
    def test_sets_with_different_tensors_are_rejected(self, other: dict[str, Tensor]) -> None:
        mean = RunningMean()
        mean.add({"w": torch.tensor([1.0, 2.0])})
        with pytest.raises(WireError, match="differ in names, shapes or dtypes"):
            mean.add(other)
        assert mean.result()["w"].tolist() == [1, 2]

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_non_finite_values_are_rejected(self, dtype: torch.dtype, bad: float) -> None:
        with pytest.raises(WireError, match="not finite"):
            RunningMean().add({"w": torch.tensor([1.0, bad], dtype=dtype)})

    @pytest.mark.parametrize("bad", [MAX_INTEGER + 1, -MAX_INTEGER - 1, 2**63 - 1, -(2**63)])
    def test_integers_out_of_range_are_rejected(self, bad: int) -> None:
        with pytest.raises(WireError, match=f"beyond ±{MAX_INTEGER}"):
            RunningMean().add({"n": torch.tensor([0, bad])})

    def test_sum_may_exceed_the_largest_float32(self) -> None:
        sets = [{"w": torch.tensor([HUGE, HUGE, -HUGE])}, {"w": torch.tensor([HUGE, -HUGE, -HUGE])}]
        assert mean_of(sets, [MAX_WEIGHT, MAX_WEIGHT])["w"].tolist() == [HUGE, 0.0, -HUGE]

    def test_mean_of_nothing_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="nothing has been added"):
            RunningMean().result()

    def test_result_is_available_between_additions(self) -> None:
        mean = RunningMean()
        mean.add({"w": torch.tensor([1.0])})
        assert mean.result()["w"].tolist() == [1]
        mean.add({"w": torch.tensor([2.0])}, 3)
        assert mean.result()["w"].tolist() == [1.75]


class TestMemory:
    def test_memory_does_not_grow_with_the_number_of_sets(self) -> None:
        elements = 1024 * 1024
        mean = RunningMean()
        sizes, kept = [], []
        for number in range(30):
            generator = torch.Generator().manual_seed(number)
            tensors = {"w": torch.randn(elements, generator=generator)}
            mean.add(tensors)
            kept.append(weakref.ref(tensors["w"]))
            del tensors
            sizes.append(mean.size_bytes)
        assert sizes[-1] <= 2 * 8 * elements
        assert sizes[1:] == sorted(sizes[1:])
        assert all(reference() is None for reference in kept)

    def test_ordinary_weights_need_one_limb(self) -> None:
        mean = RunningMean()
        for _ in range(5):
            mean.add({"w": torch.rand(1000) * 2 - 1})
        assert mean.size_bytes == 8 * 1000
