"""Held-out images that choose and held-out images that test."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from client_agent.data.holdout import MIN_SPLIT, holdout_sizes, split_holdout
from client_agent.status import HoldoutSizes

label_lists = st.lists(st.integers(0, 3), max_size=200)


@given(label_lists, st.integers(0, 100))
def test_every_image_has_one_role_or_both_if_there_are_few(labels: list[int], seed: int) -> None:
    found = split_holdout(torch.tensor(labels, dtype=torch.int64), seed)
    validation, test = found.validation.tolist(), found.test.tolist()
    assert found.is_split == (len(labels) >= MIN_SPLIT)
    if found.is_split:
        assert sorted(validation + test) == list(range(len(labels)))
    else:
        assert validation == test == list(range(len(labels)))
    assert found.sizes == holdout_sizes(len(labels))


@given(st.lists(st.integers(0, 3), min_size=MIN_SPLIT, max_size=200), st.integers(0, 100))
def test_both_halves_have_the_same_classes(labels: list[int], seed: int) -> None:
    known = torch.tensor(labels)
    found = split_holdout(known, seed)
    halves = [torch.bincount(known[part], minlength=4) for part in (found.validation, found.test)]
    assert int((halves[0] - halves[1]).abs().max()) <= 1


def test_the_split_depends_on_the_seed_only() -> None:
    labels = torch.arange(100) % 3
    one, again, other = (split_holdout(labels, seed).test.tolist() for seed in (1, 1, 2))
    assert one == again
    assert one != other


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (holdout_sizes(0), "0; models are served without being measured"),
        (holdout_sizes(59), "59 (too few to split: each is predicted by what the others choose)"),
        (holdout_sizes(61), "61 (31 choose what is served, 30 test it)"),
    ],
)
def test_sizes_are_described_for_people(sizes: HoldoutSizes, words: str) -> None:
    assert str(sizes) == words
