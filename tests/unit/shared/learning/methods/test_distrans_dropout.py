"""Offset dropout and the prior in the offset's loss: the default preset's two additions to learned offsets."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support.distrans import SHAPE, digits, options_of, plan_with
from support.halves import server_half
from support.plan_texts import plan_data, plan_errors

from shared.contract.class_totals import CLASS_TOTALS
from shared.learning.methods import client_half
from shared.learning.methods.base import ClientRecord, RoundTask, TrainingContext
from shared.learning.methods.distrans import OffsetStepper
from shared.learning.model import build_double
from shared.learning.priors import prior_shift
from shared.learning.runtime import Runtime

ALMOST_ALWAYS = 1 - 1e-9


@pytest.mark.parametrize(("dropout", "alpha"), [(0.0, 0.3), (ALMOST_ALWAYS, 0.0)])
def test_model_step_sees_the_image_with_or_without_the_offset(dropout: float, alpha: float) -> None:
    plan = plan_with(offset_lr=0.5, offset_dropout=dropout)
    net = build_double(plan, 0.3).train()
    expected, start = copy.deepcopy(net), torch.randn(SHAPE)
    offset, x, y = start.clone().requires_grad_(), digits().images[:8], digits().labels[:8]
    OffsetStepper(net, offset, plan, options_of(plan), Runtime()).step(x, y)
    assert not torch.equal(offset, start), "the offset learns in every step"
    assert net.alpha == 0.3
    expected.alpha = alpha
    F.cross_entropy(expected(x, offset.detach()), y).backward()
    torch.optim.SGD(expected.parameters(), lr=0.05).step()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value, msg=name)


def test_share_of_steps_without_the_offset_is_the_dropout() -> None:
    plan = plan_with(offset_dropout=0.25)
    net, seen = build_double(plan, 0.3).train(), list[float]()
    net.register_forward_hook(lambda *_: seen.append(net.alpha))
    stepper = OffsetStepper(net, torch.zeros(SHAPE).requires_grad_(), plan, options_of(plan), Runtime())
    torch.manual_seed(0)
    for _ in range(400):
        stepper.step(digits().images[:2], digits().labels[:2])
    of_the_model = seen[1::2]  # every other pass is the offset's
    assert set(seen[::2]) == {0.3}
    assert 0.18 < of_the_model.count(0.0) / len(of_the_model) < 0.32


def test_offset_follows_the_loss_adjusted_by_the_prior() -> None:
    plan = plan_with(offset_lr=1.0, offset_loss="prior")
    net, shift = build_double(plan, 0.3).train(), torch.randn(10)
    start, x, y = torch.randn(SHAPE), digits().images[:8], digits().labels[:8]
    expected = start.clone().requires_grad_()
    F.cross_entropy(net(x, expected) + shift, y).backward()
    assert expected.grad is not None
    offset = start.clone().requires_grad_()
    OffsetStepper(net, offset, plan, options_of(plan), Runtime(), shift).step(x, y)
    torch.testing.assert_close(offset.detach(), start - expected.grad)


def test_prior_comes_from_the_client_s_labels_and_the_federation_s_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, data = plan_with(offset_lr=1.0, offset_loss="prior"), digits()
    given = list[torch.Tensor | None]()
    original = OffsetStepper.__init__

    def spy(self: OffsetStepper, *args: object) -> None:
        given.append(args[5])  # type: ignore[arg-type]
        original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(OffsetStepper, "__init__", spy)
    counts = tuple(torch.bincount(data.labels, minlength=10).tolist())
    roster = [ClientRecord("a", counts), ClientRecord("b", tuple(range(10)))]
    server = server_half(plan)
    for facts in (server.facts(roster), {"offset_aggregation": "none"}):
        task = RoundTask("a", 1, server.initial_state().shared, {"initial_offset": torch.zeros(SHAPE)}, facts)
        client_half(plan).train(task, {}, TrainingContext(data))
    totals = [count + number for number, count in enumerate(counts)]
    assert server.facts(roster)[CLASS_TOTALS] == ",".join(map(str, totals))
    assert given[0] is not None
    torch.testing.assert_close(given[0], prior_shift(counts, totals))
    assert given[1] is None, "without totals, the loss is the plain one"


@pytest.mark.parametrize("setting", [{"offset_dropout": 0.5}, {"offset_loss": "prior"}])
def test_separate_steps_need_the_alternating_rule(setting: dict[str, object]) -> None:
    plain = {"offset_dropout": 0.0, "offset_loss": "plain", "update_rule": "joint"}
    errors = plan_errors(plan_data(method=plain | setting))
    assert any("update_rule = 'alternating'" in text for text in errors.values())
