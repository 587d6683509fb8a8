import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.core.sampling import choose_participants

NAMES = [f"site-{number:02}" for number in range(20)]
names = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=30, unique=True)
fractions = st.floats(0.001, 1)


@given(names, fractions, st.integers(0, 2**63 - 1), st.integers(1, 10**6))
def test_chooses_the_share_rounded_up_without_repeats(
    clients: list[str], fraction: float, seed: int, number: int
) -> None:
    chosen = choose_participants(clients, fraction, seed, number)
    assert len(chosen) == len(set(chosen)) == max(1, math.ceil(len(clients) * fraction - 1e-9))
    assert set(chosen) <= set(clients)


@given(names, fractions, st.integers(0, 2**63 - 1), st.integers(1, 10**6), st.randoms(use_true_random=False))
def test_depends_on_the_set_of_clients_not_on_their_order(
    clients: list[str], fraction: float, seed: int, number: int, chance: Random
) -> None:
    shuffled = chance.sample(clients, len(clients))
    assert choose_participants(shuffled, fraction, seed, number) == choose_participants(clients, fraction, seed, number)


@given(names, st.integers(0, 2**63 - 1), st.integers(1, 10**6))
def test_chooses_all_when_the_fraction_is_one(clients: list[str], seed: int, number: int) -> None:
    assert choose_participants(clients, 1.0, seed, number) == sorted(clients)


@given(names, st.integers(0, 2**63 - 1), st.integers(1, 10**6))
def test_chooses_at_least_one(clients: list[str], seed: int, number: int) -> None:
    assert len(choose_participants(clients, 1e-9, seed, number)) == 1


@pytest.mark.parametrize(("fraction", "wanted"), [(0.1, 2), (0.15, 3), (0.3, 6), (0.7, 14), (0.71, 15)])
def test_a_share_that_comes_out_even_is_not_rounded_up(fraction: float, wanted: int) -> None:
    """0.7 × 20 may come out as 14.000000000000002, and means 14."""
    assert len(choose_participants(NAMES, fraction, 0, 1)) == wanted


def test_the_choice_is_the_same_on_every_machine() -> None:
    """A rerun of an old federation must choose the same clients; the first release chose these."""
    assert choose_participants(NAMES, 0.2, seed=7, round_number=3) == ["site-05", "site-11", "site-13", "site-17"]


def test_rounds_and_seeds_choose_differently() -> None:
    by_round = {tuple(choose_participants(NAMES, 0.25, 0, number)) for number in range(1, 51)}
    by_seed = {tuple(choose_participants(NAMES, 0.25, seed, 1)) for seed in range(50)}
    assert len(by_round) > 40
    assert len(by_seed) > 40


def test_every_client_gets_a_fair_share_of_the_rounds() -> None:
    rounds = 2000
    counts = Counter(name for number in range(rounds) for name in choose_participants(NAMES, 0.25, 0, number))
    # Binomial(2000, ¼) has a standard deviation of 19; five of them either way.
    assert all(abs(counts[name] - rounds / 4) < 97 for name in NAMES)
