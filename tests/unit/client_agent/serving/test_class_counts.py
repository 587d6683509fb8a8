"""What a prior adds to logits."""

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.digit_sites import PLAN, federation_model
from torch import Tensor

from client_agent.serving.candidates import Base, Member, mean_of, single
from client_agent.serving.class_counts import ClassCounts, class_counts
from client_agent.settings import PriorKind, ServedPrior
from shared.learning.priors import log_prior

SITE, FEDERATION = (30, 10, 0), (100, 100, 200)
KNOWN = ClassCounts(SITE, FEDERATION)
GLOBAL, ALONE = Member(Base.GLOBAL, uses_prior=True), Member(Base.ALONE)
counts = st.lists(st.integers(0, 1000), min_size=3, max_size=3).filter(any)


def shift(there: tuple[float, ...], trained: tuple[float, ...]) -> Tensor:
    return log_prior(there) - log_prior(trained)


def test_each_member_is_moved_from_what_it_was_trained_with() -> None:
    assert torch.equal(KNOWN.shift(GLOBAL, "site"), shift(SITE, FEDERATION))  # type: ignore[arg-type]
    assert KNOWN.shift(ALONE, "site") is None
    assert KNOWN.shift(GLOBAL, "none") is None
    assert torch.equal(KNOWN.shift(ALONE, "none"), shift(FEDERATION, SITE))  # type: ignore[arg-type]


def test_a_deployments_frequencies_weigh_as_much_as_the_sites_images() -> None:
    prior = ServedPrior(kind="deployment", frequencies={"a": 3, "c": 1})
    deployed = KNOWN.served_as(prior, ("a", "b", "c"))
    assert deployed.deployment == (30.0, 0.0, 10.0)
    assert torch.equal(deployed.shift(GLOBAL, "deployment"), shift((30, 0, 10), FEDERATION))  # type: ignore[arg-type]
    assert torch.equal(deployed.shift(ALONE, "deployment"), shift((30, 0, 10), SITE))  # type: ignore[arg-type]
    assert torch.equal(deployed.shift(GLOBAL, "site"), shift(SITE, FEDERATION))  # type: ignore[arg-type]


def test_the_gates_choice_against_the_prior_is_respected() -> None:
    plain = Member(Base.GLOBAL)
    assert KNOWN.shift(plain, "site") is None
    assert KNOWN.applied(single(plain), "site") == "none"
    assert KNOWN.applied(single(GLOBAL), "site") == "site"


def test_classes_without_images_are_excluded_only_on_request() -> None:
    def probabilities(only_own_classes: bool, member: Member, kind: PriorKind) -> Tensor:
        known = KNOWN.served_as(ServedPrior(only_own_classes=only_own_classes), ())
        found = known.shift(member, kind)
        return torch.softmax(torch.zeros(3) if found is None else found, dim=0)

    for kind in ("site", "none"):
        for member in (GLOBAL, ALONE):
            assert float(probabilities(False, member, kind)[2]) > 0  # type: ignore[arg-type]
            assert float(probabilities(True, member, kind)[2]) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("known", [ClassCounts(), ClassCounts(site=SITE), ClassCounts(federation=FEDERATION)])
def test_without_both_counts_there_is_no_prior_and_the_answer_says_so(known: ClassCounts) -> None:
    for kind in get_args(PriorKind):
        assert known.shift(GLOBAL, kind) is None
        assert known.shift(ALONE, kind) is None
        assert known.applied(single(Member(Base.GLOBAL)), kind) is None
    assert known.applied(single(ALONE), "site") == "site"  # it knows nothing else
    assert known.applied(single(ALONE), "none") is None
    assert known.site_shift is None


def test_what_is_applied_is_named() -> None:
    both = mean_of(GLOBAL, ALONE)
    assert [KNOWN.applied(both, kind) for kind in get_args(PriorKind)] == ["site", "none", "deployment"]


@given(counts, counts)
def test_there_and_back_is_where_it_was(site: list[int], federation: list[int]) -> None:
    known = ClassCounts(site, federation)
    there, back = known.shift(GLOBAL, "site"), known.shift(ALONE, "none")
    assert there is not None
    assert back is not None
    assert torch.allclose(there + back, torch.zeros(3), atol=1e-5)


def test_totals_come_with_the_model() -> None:
    bundle = federation_model(0)
    assert class_counts(PLAN, bundle, (1, 2, 3, 4)) == ClassCounts((1, 2, 3, 4), (100, 100, 100, 100))
    bundle.facts.pop("class_totals")
    assert class_counts(PLAN, bundle, None) == ClassCounts()
