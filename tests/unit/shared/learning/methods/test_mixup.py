from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.simulating import evaluate_all
from support.tensors import differ
from support.tiny import CLASSES, digits, first_task, plan_for, site
from torch import Tensor

from lab.simulation.simulation import Simulation
from shared.learning.methods import client_half
from shared.learning.methods.base import TrainingContext
from shared.learning.methods.mixup import mix, mixed_loss

Y, PARTNERS = torch.tensor([0, 1, 3, 2]), torch.tensor([2, 0, 3, 1])


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_loss_equals_cross_entropy_with_soft_labels(share: float) -> None:
    logits = torch.randn(4, CLASSES, dtype=torch.float64)
    soft = share * F.one_hot(Y, CLASSES) + (1 - share) * F.one_hot(Y[PARTNERS], CLASSES)
    found = mixed_loss(logits, Y, PARTNERS, share)
    assert found.item() == pytest.approx(F.cross_entropy(logits.float(), soft.float()).item(), rel=1e-6)


def test_images_are_mixed_with_their_partners() -> None:
    x = torch.arange(4.0)[:, None, None, None]
    assert mix(x, PARTNERS, 0.75).flatten().tolist() == [0.5, 0.75, 2.25, 2.5]


def test_share_of_one_leaves_the_batch_unchanged_to_the_bit() -> None:
    x, logits = torch.randn(4, 1, 2, 2), torch.randn(4, CLASSES, requires_grad=True)
    assert torch.equal(mix(x, PARTNERS, 1.0), x)
    (mixed,) = torch.autograd.grad(mixed_loss(logits, Y, PARTNERS, 1.0), logits)
    (plain,) = torch.autograd.grad(F.cross_entropy(logits, Y), logits)
    assert torch.equal(mixed, plain)


def test_share_of_zero_permutes_the_batch() -> None:
    x, weight = torch.randn(4, 3), torch.randn(CLASSES, 3)
    logits = mix(x, PARTNERS, 0.0) @ weight.T
    torch.testing.assert_close(mixed_loss(logits, Y, PARTNERS, 0.0), F.cross_entropy(x @ weight.T, Y))


def test_small_alpha_mixes_almost_nothing() -> None:
    """Shares are zeros and ones, and both give the plain batch."""
    client, methods = site("a", digits()), [{"name": "fedavg"}, {"name": "mixup", "alpha": 1e-3}]
    plans = [plan_for(method, training={"epochs": 3}) for method in methods]
    plain, mixed = (
        client_half(plan).train(first_task(plan, client), {}, TrainingContext(client.train))[0] for plan in plans
    )
    torch.testing.assert_close(mixed.shared, plain.shared, rtol=1e-4, atol=1e-6)


def test_alpha_zero_equals_fedavg_to_the_bit_and_alpha_one_does_not() -> None:
    client, fedavg = site("a", digits()), plan_for({"name": "fedavg"})
    task = first_task(fedavg, client)
    plain, _ = client_half(fedavg).train(task, {}, TrainingContext(client.train))
    for alpha, same in ((0.0, True), (1.0, False)):
        plan = plan_for({"name": "mixup", "alpha": alpha})
        mixed, private = client_half(plan).train(task, {}, TrainingContext(client.train))
        assert private == {}
        assert differ(mixed.shared, plain.shared) is not same


def test_batch_of_one_image_is_unchanged() -> None:
    client, fedavg = site("a", digits(1)), plan_for({"name": "fedavg"})
    plain, _ = client_half(fedavg).train(first_task(fedavg, client), {}, TrainingContext(client.train))
    plan = plan_for({"name": "mixup"})
    mixed, _ = client_half(plan).train(first_task(plan, client), {}, TrainingContext(client.train))
    for name, value in plain.shared.items():
        torch.testing.assert_close(mixed.shared[name], value)


def test_every_batch_round_and_client_has_its_own_repeatable_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, client = plan_for({"name": "mixup"}), site("a", digits())
    task, drawn = first_task(plan, client), list[tuple[float, list[int]]]()

    def listening(x: Tensor, partners: Tensor, share: float) -> Tensor:
        drawn.append((share, partners.tolist()))
        return mix(x, partners, share)

    monkeypatch.setattr("shared.learning.methods.mixup.mix", listening)
    for one in (task, task, replace(task, round=2), replace(task, client_id="b")):
        client_half(plan).train(one, {}, TrainingContext(client.train))
    first, again, later, other = (drawn[start : start + 3] for start in range(0, 12, 3))
    assert first == again
    different = [*first, *later, *other]
    assert len({share for share, _ in different}) == len({tuple(partners) for _, partners in different}) == 9
    assert all(sorted(partners) == list(range(8)) for _, partners in different)


def test_accuracy_improves() -> None:
    plan, client = plan_for({"name": "mixup"}, training={"lr": 0.1}), site("a", digits())
    simulation = Simulation(plan, [client])
    accuracies = []
    for _ in range(8):
        simulation.run_round()
        accuracies.append(evaluate_all(simulation).accuracy or 0.0)
    assert accuracies[-1] > 0.7
