import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contract.class_totals import CLASS_TOTALS, class_totals_fact, read_class_totals


@given(st.lists(st.lists(st.integers(0, 10**6), min_size=3, max_size=3), min_size=1, max_size=5))
def test_totals_are_read_back_as_the_sum_over_clients(counts: list[list[int]]) -> None:
    totals = tuple(sum(column) for column in zip(*counts, strict=True))
    assert read_class_totals(class_totals_fact(counts), 3) == (totals if any(totals) else None)


def test_client_that_withholds_its_counts_changes_nothing() -> None:
    assert class_totals_fact([(3, 4), (0, 0)]) == class_totals_fact([(3, 4)]) == {CLASS_TOTALS: "3,4"}


@pytest.mark.parametrize("counts", [[], [(0, 0)], [(1,) * 5000]])
def test_there_are_no_totals_without_counts_or_with_too_many_classes(counts: list[tuple[int, ...]]) -> None:
    assert class_totals_fact(counts) == {}


@pytest.mark.parametrize("text", ["", "3", "3,4,5", "3,-4", "3,4.0", "3,٤", "3,x", "3," + "9" * 19, "0,0"])
def test_broken_totals_count_as_unknown(text: str) -> None:
    assert read_class_totals({CLASS_TOTALS: text}, 2) is None
