"""Candidates and their probabilities."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from client_agent.serving.candidates import (
    Base,
    Candidate,
    Member,
    as_trained,
    blended_members,
    fixed_candidates,
    mean_of,
    member_logits,
    single,
)

ALL = list(Base)
DISTRANS = [Base.GLOBAL, Base.OFFSET, Base.ADAPTED, Base.ALONE]


def test_the_prior_is_for_models_that_assume_the_federations_frequencies() -> None:
    with_prior = {member.base for member in blended_members(ALL, has_prior=True) if member.uses_prior}
    assert with_prior == {Base.GLOBAL, Base.OFFSET, Base.ADAPTED}
    assert not any(member.uses_prior for member in blended_members(ALL, has_prior=False))


def test_candidates_are_ordered_means_first_and_alone_last() -> None:
    names = [candidate.name for candidate in fixed_candidates([Base.GLOBAL, Base.OFFSET, Base.ALONE], has_prior=True)]
    assert names == [
        "global+prior & offset+prior",
        "global+prior & alone",
        "offset+prior & alone",
        "offset+prior",
        "global+prior",
        "offset",
        "global",
        "alone",
    ]


def test_without_a_prior_no_candidate_appears_twice() -> None:
    names = [candidate.name for candidate in fixed_candidates(DISTRANS, has_prior=False)]
    assert len(names) == len(set(names)) == 10


def test_only_the_sites_own_model_is_not_federated() -> None:
    candidates = fixed_candidates(DISTRANS, has_prior=True)
    assert [one.name for one in candidates if not one.is_federated] == ["alone"]


@pytest.mark.parametrize(
    ("bases", "name"),
    [
        (DISTRANS, "offset+prior"),
        ([Base.GLOBAL, Base.ADAPTED, Base.ALONE], "global+prior"),
        ([Base.PERSONAL, Base.ALONE], "personal"),
    ],
)
def test_without_a_measurement_the_model_is_served_as_trained(bases: list[Base], name: str) -> None:
    assert as_trained(bases, has_prior=True).name == name
    assert as_trained(bases, has_prior=False).name == name.removesuffix("+prior")


def test_a_mean_is_the_mean_of_probabilities_not_of_logits() -> None:
    one, other = Member(Base.GLOBAL, uses_prior=True), Member(Base.ALONE)
    logits = {Base.GLOBAL: torch.tensor([[0.0, 0.0]]), Base.ALONE: torch.tensor([[0.0, 3.0]]).log()}
    shift = torch.tensor([3.0, 1.0]).log()
    found = member_logits(logits, shift, [one, other])
    torch.testing.assert_close(single(one).probabilities(found), torch.tensor([[0.75, 0.25]]))
    torch.testing.assert_close(single(other).probabilities(found), torch.tensor([[0.0, 1.0]]))
    torch.testing.assert_close(mean_of(one, other).probabilities(found), torch.tensor([[0.375, 0.625]]))


def test_a_weighted_sum_of_logits_is_a_product_of_powers_of_probabilities() -> None:
    one, other = Member(Base.GLOBAL), Member(Base.ALONE)
    probabilities = {one: torch.tensor([[0.64, 0.36]]), other: torch.tensor([[0.2, 0.8]])}
    logits = {member: values.log() + 7 for member, values in probabilities.items()}
    product = probabilities[one] ** 0.5 * probabilities[other] ** 2
    found = Candidate("blend", ((one, 0.5), (other, 2.0)), mixed="logits").probabilities(logits)
    torch.testing.assert_close(found, product / product.sum())


@given(st.integers(0, 2**32 - 1), st.lists(st.floats(0.01, 1), min_size=4, max_size=4))
def test_every_candidates_probabilities_sum_to_one(seed: int, shares: list[float]) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits: dict[Base, Tensor] = {base: 5 * torch.randn(6, 3, generator=generator) for base in DISTRANS}
    members = blended_members(DISTRANS, has_prior=True)
    blend = Candidate(
        "blend", tuple((member, share) for member, share in zip(members, shares, strict=True)), mixed="logits"
    )
    shift = torch.randn(3, generator=generator)
    candidates = [blend, *fixed_candidates(DISTRANS, has_prior=True)]
    every = {member for candidate in candidates for member, _ in candidate.weights}
    found = member_logits(logits, shift, every)
    for candidate in candidates:
        probabilities = candidate.probabilities(found)
        torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(6))
        assert bool((probabilities >= 0).all())
