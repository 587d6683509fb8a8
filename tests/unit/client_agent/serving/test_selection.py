"""The choice between candidates on validation images."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from client_agent.serving import selection
from client_agent.serving.candidates import BLEND, Base, Member
from client_agent.serving.selection import MAX_FOLDS, PENALTY, choose, cross_fit, expected_weights, fit_blend, folds

CLASSES = 4
seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 40)
Logits = dict[Base, Tensor]
BOTH = [Member(Base.GLOBAL), Member(Base.ALONE)]


def labels_of(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, CLASSES, (count,), generator=torch.Generator().manual_seed(seed))


def logits_for(labels: Tensor, seed: int, **skill: float) -> Logits:
    """Return random logits with so much added at the right class."""
    generator = torch.Generator().manual_seed(seed)
    return {
        Base(name): torch.randn(len(labels), CLASSES, generator=generator)
        + points * torch.nn.functional.one_hot(labels, CLASSES)
        for name, points in skill.items()
    }


def members_of(logits: Logits) -> dict[Member, Tensor]:
    return {Member(base): values for base, values in logits.items()}


def site(count: int, seed: int) -> tuple[Logits, Tensor, Tensor]:
    """Return logits, labels and a prior shift that depend on the seed."""
    generator = torch.Generator().manual_seed(seed)
    skill = {base.value: float(4 * torch.rand(1, generator=generator)) for base in Base if base is not Base.PERSONAL}
    labels = labels_of(count, seed)
    return logits_for(labels, seed + 1, **skill), labels, torch.randn(CLASSES, generator=generator)


def test_a_federation_that_hurts_leaves_the_site_with_its_own_model() -> None:
    labels = labels_of(300)
    logits = logits_for(labels, 1, alone=6.0) | logits_for(labels, 2, **{"global": -4.0, "offset": -4.0})
    choice = choose(logits, labels, None)
    assert choice.candidate.name == "alone"
    assert not choice.candidate.is_federated
    assert min(choice.losses, key=lambda name: choice.losses[name]) == "alone"


def test_alone_is_not_chosen_if_a_federated_candidate_is_as_good() -> None:
    labels = labels_of(100)
    same = logits_for(labels, 1, alone=2.0)[Base.ALONE]
    assert choose({Base.GLOBAL: same, Base.ALONE: same}, labels, None).candidate.is_federated


def test_models_with_different_strengths_are_blended() -> None:
    labels = labels_of(200)
    good, bad = logits_for(labels, 1, alone=4.0)[Base.ALONE], torch.zeros(200, CLASSES)
    first_half = (torch.arange(200) < 100)[:, None]
    logits = {Base.GLOBAL: torch.where(first_half, good, bad), Base.ALONE: torch.where(first_half, bad, good)}
    choice = choose(logits, labels, None)
    assert choice.candidate.name == BLEND
    # Each model knows nothing about half of the images, so both deserve their full weight.
    assert all(weight > 0.75 for _, weight in choice.candidate.weights)


def test_a_model_that_is_too_sure_gets_a_small_weight() -> None:
    labels = labels_of(300)
    modest = logits_for(labels, 1, **{"global": 2.0})[Base.GLOBAL]
    boastful = 20 * logits_for(labels, 2, alone=1.0)[Base.ALONE]
    weights = dict(fit_blend({Member(Base.GLOBAL): modest, Member(Base.ALONE): boastful}, labels, BOTH).weights)
    assert 0.02 < weights[Member(Base.ALONE)] < 0.1
    assert weights[Member(Base.GLOBAL)] > 0.5


def test_few_images_leave_the_weights_near_what_is_expected() -> None:
    labels = labels_of(1)
    logits = logits_for(labels, 1, **{"global": -1.0, "alone": 1.0})
    found = fit_blend(members_of(logits), labels, BOTH).weights
    assert [weight for _, weight in found] == pytest.approx(expected_weights(BOTH), abs=0.25)


def test_a_prior_that_fits_is_used() -> None:
    labels = torch.tensor([0] * 90 + [1] * 10)
    logits = {Base.GLOBAL: torch.zeros(100, 2)}
    assert choose(logits, labels, torch.tensor([0.9, 0.1]).log()).candidate.name == "global+prior"
    assert choose(logits, labels, torch.tensor([0.1, 0.9]).log()).candidate.name == "global"


def test_a_blend_of_one_model_is_that_model() -> None:
    labels = labels_of(1000)
    logits = logits_for(labels, 1, alone=9.0) | logits_for(labels, 2, **{"global": -9.0})
    assert [member.base for member, _ in fit_blend(members_of(logits), labels, BOTH).weights] == [Base.ALONE]
    assert BLEND not in choose(logits, labels, None).losses


def test_without_images_the_model_is_served_as_trained() -> None:
    empty = torch.zeros(0, CLASSES)
    choice = choose({Base.GLOBAL: empty, Base.OFFSET: empty, Base.ALONE: empty}, labels_of(0), torch.zeros(CLASSES))
    assert (choice.candidate.name, choice.losses) == ("offset+prior", {})


@pytest.mark.parametrize("seed", range(5))
def test_the_blends_weights_maximize_the_penalized_likelihood(seed: int) -> None:
    labels = labels_of(60, seed)
    logits = members_of(logits_for(labels, seed, **{"global": 1.0, "alone": 2.0}))
    expected = expected_weights(BOTH)

    def objective(weights: tuple[float, float]) -> float:
        mixed = weights[0] * logits[BOTH[0]] + weights[1] * logits[BOTH[1]]
        distance = sum((weight - other) ** 2 for weight, other in zip(weights, expected, strict=True))
        return (
            float(torch.nn.functional.cross_entropy(mixed.double(), labels, reduction="sum")) + PENALTY / 2 * distance
        )

    (_, first), (_, second) = fit_blend(logits, labels, BOTH).weights
    steps = (-0.05, -0.01, 0.0, 0.01, 0.05)
    assert all(objective((first, second)) <= objective((first + a, second + b)) for a in steps for b in steps)


@given(sizes, seeds)
def test_weights_are_positive_and_those_of_probabilities_sum_to_one(count: int, seed: int) -> None:
    logits, labels, shift = site(count, seed)
    candidate = choose(logits, labels, shift).candidate
    weights = [weight for _, weight in candidate.weights]
    assert min(weights) > 0
    assert candidate.mixed == "logits" or sum(weights) == pytest.approx(1)


@given(sizes, seeds, st.floats(0, 1e6))
def test_a_model_with_huge_logits_does_not_break_the_blend(count: int, seed: int, scale: float) -> None:
    logits, labels, shift = site(count, seed)
    logits[Base.ALONE] *= scale
    found = cross_fit(logits, labels, shift)
    torch.testing.assert_close(found.sum(dim=1), torch.ones(count))


@given(sizes, seeds, seeds)
def test_the_choice_does_not_depend_on_the_order_of_the_images(count: int, seed: int, other_seed: int) -> None:
    logits, labels, shift = site(count, seed)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(other_seed))
    choice = choose(logits, labels, shift)
    again = choose({base: values[order] for base, values in logits.items()}, labels[order], shift)
    assert again.candidate.name == choice.candidate.name
    assert [weight for _, weight in again.candidate.weights] == pytest.approx(
        [weight for _, weight in choice.candidate.weights], rel=1e-3
    )
    assert again.losses == pytest.approx(choice.losses, rel=1e-3)


@settings(max_examples=30)
@given(st.integers(2, 30), seeds)
def test_an_images_own_label_is_not_used_to_predict_it(count: int, seed: int) -> None:
    logits, labels, shift = site(count, seed)
    index = seed % count
    other = labels.clone()
    other[index] = (other[index] + 1) % CLASSES
    with pytest.MonkeyPatch.context() as patch:
        # Parts are balanced by label. They must stay the same here, or other images would change, too.
        patch.setattr(selection, "folds", lambda known, _: list(torch.arange(len(known)).chunk(5)))
        before, after = cross_fit(logits, labels, shift), cross_fit(logits, other, shift)
    assert torch.equal(before[index], after[index])


@given(sizes, seeds)
def test_every_image_is_in_one_part_and_classes_are_spread(count: int, seed: int) -> None:
    logits, labels, _ = site(count, seed)
    parts = folds(labels, members_of(logits))
    assert len(parts) == min(MAX_FOLDS, count)
    assert sorted(torch.cat(parts).tolist()) == list(range(count))
    counts = torch.stack([torch.bincount(labels[part], minlength=CLASSES) for part in parts])
    assert int((counts.max(dim=0).values - counts.min(dim=0).values).max()) <= 1


def test_calibration_sees_the_other_images_only() -> None:
    logits, labels, shift = site(25, 3)
    seen: list[int] = []

    def calibrate(probabilities: Tensor, known: Tensor) -> Callable[[Tensor], Tensor]:
        assert len(probabilities) == len(known)
        seen.append(len(known))
        return lambda found: torch.full_like(found, len(found))

    found = cross_fit(logits, labels, shift, calibrate)
    assert seen == [22] * 5 + [23] * 5
    assert sorted(found[:, 0].tolist()) == [2.0] * 10 + [3.0] * 15
