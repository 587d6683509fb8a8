"""A client's class frequencies relative to the federation's."""

import torch
from support.tiny import digits, plan_for

from shared.learning.methods.base import RoundTask
from shared.learning.site_prior import site_prior_shift

PLAN = plan_for({"name": "fedavg"})


def task(**facts: str) -> RoundTask:
    return RoundTask("north", 1, {}, {}, facts)


def test_the_shift_is_the_log_ratio_of_smoothed_frequencies() -> None:
    data = digits(24)
    own = torch.bincount(data.labels, minlength=4).double() + 1
    everyone = torch.tensor([10.0, 20.0, 30.0, 40.0], dtype=torch.float64) + 1
    found = site_prior_shift(PLAN, task(class_totals="10,20,30,40"), data)
    expected = ((own / own.sum()) / (everyone / everyone.sum())).log().float()
    assert found is not None
    torch.testing.assert_close(found, expected)


def test_a_site_like_the_federation_needs_no_adjustment() -> None:
    data = digits(24)
    totals = ",".join(str(count) for count in torch.bincount(data.labels, minlength=4).tolist())
    found = site_prior_shift(PLAN, task(class_totals=totals), data)
    assert found is not None
    assert torch.equal(found, torch.zeros(4))


def test_without_usable_totals_there_is_no_prior() -> None:
    assert site_prior_shift(PLAN, task(), digits(24)) is None
    assert site_prior_shift(PLAN, task(class_totals="1,2,3"), digits(24)) is None
    assert site_prior_shift(PLAN, task(class_totals="0,0,0,0"), digits(24)) is None
