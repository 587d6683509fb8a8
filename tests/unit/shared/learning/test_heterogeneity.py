from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from shared.contract.errors import SplitError
from shared.learning.heterogeneity import class_embeddings, count_classes, distributional_heterogeneity

counts_arrays = arrays(np.int64, st.tuples(st.integers(1, 6), st.integers(1, 6)), elements=st.integers(0, 50))


@pytest.mark.parametrize(
    ("counts", "dh"),
    [
        ([[1, 1], [1, 1]], 0.0),
        ([[5, 0], [0, 5]], 1.0),
        ([[5, 3], [0, 5]], 0.5),
        ([[1, 1, 0], [1, 0, 0]], 1 - 2 / 6),  # nobody holds the third class
        ([[0, 0], [0, 0]], 1.0),
        ([[4, 4, 4]], 1.0),  # a single client shares nothing
    ],
)
def test_dh_matches_values_worked_out_by_hand(counts: list[list[int]], dh: float) -> None:
    assert distributional_heterogeneity(counts) == pytest.approx(dh)


@given(counts=counts_arrays)
def test_dh_is_between_0_and_1_and_depends_only_on_who_holds_a_class(counts: NDArray[np.int64]) -> None:
    dh = distributional_heterogeneity(counts)
    assert 0 <= dh <= 1
    assert distributional_heterogeneity(counts > 0) == dh
    assert distributional_heterogeneity(counts[::-1, ::-1] * 7) == dh


@given(clients=st.integers(2, 100), data=st.data())
def test_dh_is_rounded_only_once(clients: int, data: st.DataObject) -> None:
    """A DH of 20 % must not be below a threshold of 0.2; in floating point, 1 − 0.8 is."""
    holders = data.draw(st.integers(2, clients))
    counts = np.arange(clients)[:, None] < holders
    assert distributional_heterogeneity(counts) == (clients - holders) / clients


@pytest.mark.parametrize("nothing", [[], [[]]])
def test_dh_needs_a_client_and_a_class(nothing: list[Any]) -> None:
    with pytest.raises(SplitError, match="at least one client"):
        distributional_heterogeneity(nothing)


def test_embedding_is_the_client_s_share_of_each_class_not_its_own_histogram() -> None:
    assert class_embeddings([[30, 10], [10, 30]]).tolist() == [[0.75, 0.25], [0.25, 0.75]]
    assert class_embeddings([[30, 10], [90, 10]]).tolist() == [[0.25, 0.5], [0.75, 0.5]]


@given(counts=counts_arrays)
def test_embeddings_of_a_held_class_sum_to_one_over_the_clients(counts: NDArray[np.int64]) -> None:
    embeddings = class_embeddings(counts)
    assert embeddings.shape == counts.shape
    assert (embeddings >= 0).all()
    np.testing.assert_allclose(embeddings.sum(axis=0), (counts.sum(axis=0) > 0).astype(float))


def test_class_counts_include_classes_without_images() -> None:
    assert count_classes([2, 0, 2], 4).tolist() == [1, 0, 2, 0]
    assert count_classes([], 2).tolist() == [0, 0]
