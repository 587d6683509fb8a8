"""What answers: members, views, priors and temperature."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.digit_sites import PLAN, digits_data, digits_plan, federation_model
from torch import Tensor

from client_agent.serving.baseline import LocalBaseline
from client_agent.serving.bases import federated_bases
from client_agent.serving.candidates import Base, Candidate, Member, mean_of, single
from client_agent.serving.model import AS_SERVED, Recipe, ServingModel, View, build
from client_agent.settings import SITE_PRIOR, ServedPrior
from shared.learning.priors import prior_shift
from shared.learning.runtime import Runtime

BUNDLE = federation_model(3, epochs=2)
SITE, TOTALS = (30, 10, 0, 0), (100,) * 4
IMAGES = torch.cat([images for _, images, _ in digits_data(test=6).test.in_order(6)])
OFFSET, GLOBAL, ALONE = Member(Base.OFFSET, True), Member(Base.GLOBAL, True), Member(Base.ALONE)
WEIGHTS = {"alone": LocalBaseline(PLAN, "north").start()}


def model(candidate: Candidate, temperature: float = 1.0, prior: ServedPrior = SITE_PRIOR) -> ServingModel:
    recipe = Recipe(candidate, temperature, SITE, WEIGHTS, "record")
    return build(PLAN, "north", BUNDLE, Runtime(), recipe, prior)


def logits(base: Base) -> Tensor:
    return model(mean_of(OFFSET, ALONE)).predictors[base](IMAGES)


def test_without_a_recipe_the_model_answers_as_it_was_trained() -> None:
    found = build(PLAN, "north", BUNDLE, Runtime())
    assert torch.equal(found.predict(IMAGES), logits(Base.OFFSET).softmax(dim=1))
    assert (found.candidate.name, found.record, found.applied_prior()) == ("offset", "", None)


def test_members_are_mixed_with_the_prior_and_calibrated() -> None:
    found = model(Candidate("blend", ((OFFSET, 0.75), (ALONE, 0.25))), temperature=2.0)
    shift = prior_shift(SITE, TOTALS)
    mixed = 0.75 * (logits(Base.OFFSET) + shift).softmax(1) + 0.25 * logits(Base.ALONE).softmax(1)
    expected = mixed.sqrt() / mixed.sqrt().sum(dim=1, keepdim=True)
    torch.testing.assert_close(found.predict(IMAGES), expected)
    assert found.applied_prior() == "site"


def test_a_blend_adds_up_the_members_logits() -> None:
    found = model(Candidate("blend", ((OFFSET, 0.75), (ALONE, 0.5)), mixed="logits"))
    expected = 0.75 * (logits(Base.OFFSET) + prior_shift(SITE, TOTALS)) + 0.5 * logits(Base.ALONE)
    torch.testing.assert_close(found.predict(IMAGES), expected.softmax(1))


def test_the_prior_can_be_chosen_per_request() -> None:
    found = model(mean_of(OFFSET, ALONE))
    none = View(prior="none")
    back = prior_shift(TOTALS, SITE)
    expected = (logits(Base.OFFSET).softmax(1) + (logits(Base.ALONE) + back).softmax(1)) / 2
    torch.testing.assert_close(found.predict(IMAGES, none), expected)
    assert found.applied_prior(none) == "none"
    assert torch.equal(found.predict(IMAGES, View(prior="site")), found.predict(IMAGES))


def test_a_deployments_prior_is_the_default_of_an_agent_that_has_one() -> None:
    rare = ServedPrior(kind="deployment", frequencies={"0": 1, "1": 999})
    found, plain = model(single(OFFSET), prior=rare), model(single(OFFSET))
    shift = prior_shift((0.04, 39.96, 0, 0), TOTALS)
    torch.testing.assert_close(found.predict(IMAGES), (logits(Base.OFFSET) + shift).softmax(1))
    assert (found.applied_prior(), found.applied_prior(View(prior="site"))) == ("deployment", "site")
    assert torch.equal(found.predict(IMAGES, View(prior="site")), plain.predict(IMAGES))


def test_without_the_offset_global_replaces_the_members_that_have_it() -> None:
    found = model(Candidate("blend", ((OFFSET, 0.75), (ALONE, 0.25))))
    bare = View(use_offset=False)
    shift = prior_shift(SITE, TOTALS)
    expected = 0.75 * (logits(Base.GLOBAL) + shift).softmax(1) + 0.25 * logits(Base.ALONE).softmax(1)
    torch.testing.assert_close(found.predict(IMAGES, bare), expected)
    assert [member.base for member, _ in found.members(bare)] == [Base.GLOBAL, Base.ALONE]


def test_without_the_offset_members_that_become_the_same_are_one() -> None:
    found = model(Candidate("blend", ((GLOBAL, 0.2), (OFFSET, 0.5), (ALONE, 0.3))))
    assert found.members(View(use_offset=False)) == [(GLOBAL, pytest.approx(0.7)), (ALONE, 0.3)]


def test_a_candidate_without_offset_needs_neither_offset_nor_global() -> None:
    found = model(single(ALONE))
    assert list(found.predictors) == [Base.ALONE]
    assert found.offset_digest is None
    assert torch.equal(found.predict(IMAGES, View(use_offset=False)), found.predict(IMAGES))


def test_other_classes_are_never_predicted_if_asked_for() -> None:
    own = ServedPrior(only_own_classes=True)
    blend = Candidate("blend", ((OFFSET, 0.9), (ALONE, 0.001)), mixed="logits")
    assert float(model(mean_of(OFFSET, ALONE), prior=own).predict(IMAGES)[:, 2:].max()) == 0
    assert float(model(blend, prior=own).predict(IMAGES)[:, 2:].max()) == 0
    assert float(model(mean_of(OFFSET, ALONE)).predict(IMAGES)[:, 2:].min()) > 0


@pytest.mark.parametrize(
    ("method", "bases"),
    [
        ({"name": "distrans", "offset_aggregation": "none"}, [Base.GLOBAL, Base.OFFSET]),
        ({"name": "fedavg"}, [Base.GLOBAL]),
        ({"name": "fedaws"}, [Base.GLOBAL]),
        ({"name": "moon", "projection_dim": 8}, [Base.GLOBAL]),
        ({"name": "pfedme"}, [Base.PERSONAL]),
        ({"name": "pfedhn", "hidden": 8}, [Base.PERSONAL]),
    ],
)
def test_every_method_says_what_its_model_is(method: dict[str, object], bases: list[Base]) -> None:
    plan = digits_plan(method)
    bundle = federation_model(1, plan=plan)
    assert federated_bases(plan, "north", bundle) == bases
    found = build(plan, "north", bundle, Runtime())
    torch.testing.assert_close(found.predict(IMAGES).sum(dim=1), torch.ones(6))
    assert torch.equal(found.predict(IMAGES, View(use_offset=False)).isfinite().all(), torch.tensor(True))


@given(st.floats(0.01, 0.99), st.floats(0.25, 4), st.booleans(), st.sampled_from(["site", "none", None]))
def test_probabilities_always_sum_to_one(share: float, temperature: float, use_offset: bool, prior: None) -> None:
    parts = ((OFFSET, share), (ALONE, 1 - share))
    found = model(Candidate("blend", parts, "logits" if temperature < 1 else "probabilities"), temperature)
    torch.testing.assert_close(found.predict(IMAGES, View(use_offset, prior)).sum(dim=1), torch.ones(6))


def test_the_default_view_is_what_is_served() -> None:
    assert View() == AS_SERVED
