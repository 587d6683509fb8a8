from itertools import permutations
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.halves import server_half
from support.plans import small_plan, update_tensors

from server.core.folding import Peak, RoundFold, blame, first_nonfinite, peak_of
from shared.contract.plan import FederationPlan
from shared.learning.methods.base import ClientRecord, RoundContext
from shared.learning.methods.tensor_half import TensorState
from shared.tensors.mean import RunningMean
from shared.tensors.names import PERSONAL, SHARED, strip_prefix
from shared.tensors.wire import digest, encode

ROSTER = [ClientRecord(name, (count, 20 - count)) for name, count in (("a", 1), ("b", 5), ("c", 10), ("d", 19))]
TINY_NETWORK = {"offset_aggregation": "network", "generator": {"width": 8, "hidden": 8}}


def plan_with(averaging: str = "uniform", **method: Any) -> FederationPlan:
    return small_plan(averaging=averaging, method={"name": "distrans", **method})


PLANS = {
    "fedavg": small_plan(method={"name": "fedavg"}),
    "by samples": small_plan(averaging="samples", method={"name": "fedavg"}),
    "no offsets": plan_with(offset_aggregation="none"),
    "mean offset": plan_with("samples", offset_aggregation="mean"),
    "offset network": plan_with(**TINY_NETWORK),
}


def aggregate(plan: FederationPlan, order: list[ClientRecord]) -> TensorState:
    """Run a round in which the updates arrive in this order."""
    half = server_half(plan)
    facts = half.facts(ROSTER)
    seeds = {client.id: number for number, client in enumerate(ROSTER)}
    updates = {client.id: update_tensors(plan, facts, seeds[client.id]) for client in order}
    fold = RoundFold(half)
    for client in order:
        fold.add(client, strip_prefix(updates[client.id], SHARED))
    personal = [
        (client, strip_prefix(updates[client.id], PERSONAL)) for client in sorted(order, key=lambda item: item.id)
    ]
    return half.finish(half.initial_state(), fold.mean(), personal, RoundContext(ROSTER, facts))


def bits(state: TensorState) -> tuple[str, str]:
    return digest(encode(state.shared)), digest(encode(state.private))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_the_order_of_landing_does_not_change_a_bit(plan: FederationPlan) -> None:
    expected = bits(aggregate(plan, ROSTER))
    for order in list(permutations(ROSTER))[1::5]:
        assert bits(aggregate(plan, list(order))) == expected


def test_who_is_missing_changes_the_result() -> None:
    plan = PLANS["fedavg"]
    assert bits(aggregate(plan, ROSTER[:3])) != bits(aggregate(plan, ROSTER))


class TestFold:
    def test_takes_each_client_once(self) -> None:
        """A process that reads the stored updates again must not count one twice."""
        plan = PLANS["fedavg"]
        half = server_half(plan)
        once, twice = RoundFold(half), RoundFold(half)
        for seed, client in enumerate(ROSTER):
            update = strip_prefix(update_tensors(plan, {}, seed), SHARED)
            once.add(client, update)
            twice.add(client, update)
            twice.add(client, update)
            twice.add(ROSTER[0], update)
        assert once.folded == twice.folded == {client.id for client in ROSTER}
        assert encode(once.mean()) == encode(twice.mean())

    def test_starts_without_any_client(self) -> None:
        assert RoundFold(server_half(PLANS["fedavg"])).folded == set()

    def test_is_the_plain_mean(self) -> None:
        plan = PLANS["fedavg"]
        mean = RunningMean()
        for seed in range(len(ROSTER)):
            mean.add(strip_prefix(update_tensors(plan, {}, seed), SHARED))
        assert digest(encode(aggregate(plan, ROSTER).shared)) == digest(encode(mean.result()))

    def test_weighs_by_samples_where_the_plan_says_so(self) -> None:
        plan = PLANS["by samples"]
        half = server_half(plan)
        fold = RoundFold(half)
        for name, samples, value in (("a", 1, 0.0), ("b", 3, 4.0)):
            update = {
                key: torch.full_like(tensor, value)
                for key, tensor in strip_prefix(update_tensors(plan, {}, 0), SHARED).items()
            }
            fold.add(ClientRecord(name, (samples,)), update)
        assert all(bool((array == 3.0).all()) for array in fold.mean().values())

    @settings(max_examples=25)
    @given(
        st.lists(st.tuples(st.floats(-(2.0**100), 2.0**100, width=32), st.integers(1, 2**20)), min_size=1, max_size=8),
        st.randoms(use_true_random=False),
    )
    def test_is_exact_whatever_the_numbers_and_their_order(
        self, terms: list[tuple[float, int]], chance: Random
    ) -> None:
        half = server_half(PLANS["by samples"])
        folds = []
        for order in (terms, chance.sample(terms, len(terms))):
            fold = RoundFold(half)
            for number, (value, samples) in enumerate(order):
                fold.add(ClientRecord(str(number), (samples,)), {"w": torch.tensor([value])})
            folds.append(fold.mean()["w"].tobytes())
        assert folds[0] == folds[1]


class TestBlame:
    def test_names_the_update_that_stands_out(self) -> None:
        said = blame([Peak("a", "w", 0.5), Peak("b", "w", 3e38), Peak("c", "w", 2.0)])
        assert said == "the update from 'b' has values up to 3e+38 in 'w'; 2 is the largest in any other update"

    def test_blames_nobody_if_no_update_stands_out(self) -> None:
        said = blame([Peak("a", "w", 2e38), Peak("b", "w", 3e38)])
        assert said.startswith("no update stands out: the update from 'b' has values up to 3e+38")

    def test_names_the_only_one(self) -> None:
        assert blame([Peak("a", "w", 7.0)]) == "the update from 'a' has values up to 7 in 'w'"
        assert blame([]) == "no update of the round is readable"

    def test_finds_the_largest_value(self) -> None:
        update = {"n": np.array([99]), "e": np.ones(0), "v": np.array([1.0, -4.0]), "w": np.ones(2)}
        assert peak_of("a", update) == Peak("a", "v", 4.0)

    def test_finds_nonfinite_values(self) -> None:
        assert first_nonfinite({"n": np.array([2]), "w": np.ones(2)}) is None
        assert first_nonfinite({"v": np.ones(1), "w": np.array([1.0, np.nan])}) == "w"


def test_a_weight_stays_in_what_the_mean_can_take() -> None:
    half = server_half(PLANS["by samples"])
    assert [half.weight(ClientRecord("a", counts)) for counts in ((), (3, 4), (2**28, 5))] == [1, 7, 2**28]


def test_an_update_is_cut_into_its_parts_by_prefix() -> None:
    update = {f"{SHARED}personal.w": torch.ones(1), f"{PERSONAL}offset": torch.zeros(2)}
    assert strip_prefix(update, SHARED).keys() == {"personal.w"}
    assert strip_prefix(update, PERSONAL).keys() == {"offset"}
