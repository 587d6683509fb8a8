from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.tiny import CLASSES, differ, digits, first_task, plan_for, site
from torch import Tensor

from lab.simulation import Simulation
from shared.methods import client_half
from shared.methods.base import Workplace
from shared.methods.mixup import mix, mixed_loss

Y, PARTNERS = torch.tensor([0, 1, 3, 2]), torch.tensor([2, 0, 3, 1])


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_loss_is_that_of_soft_labels(share: float) -> None:
    logits = torch.randn(4, CLASSES, dtype=torch.float64)
    soft = share * F.one_hot(Y, CLASSES) + (1 - share) * F.one_hot(Y[PARTNERS], CLASSES)
    found = mixed_loss(logits, Y, PARTNERS, share)
    assert found.item() == pytest.approx(F.cross_entropy(logits.float(), soft.float()).item(), rel=1e-6)


def test_images_are_mixed_with_their_partners() -> None:
    x = torch.arange(4.0)[:, None, None, None]
    assert mix(x, PARTNERS, 0.75).flatten().tolist() == [0.5, 0.75, 2.25, 2.5]


def test_a_share_of_one_is_the_plain_batch_to_the_bit() -> None:
    x, logits = torch.randn(4, 1, 2, 2), torch.randn(4, CLASSES, requires_grad=True)
    assert torch.equal(mix(x, PARTNERS, 1.0), x)
    (mixed,) = torch.autograd.grad(mixed_loss(logits, Y, PARTNERS, 1.0), logits)
    (plain,) = torch.autograd.grad(F.cross_entropy(logits, Y), logits)
    assert torch.equal(mixed, plain)


def test_a_share_of_zero_is_the_batch_in_another_order() -> None:
    x, weight = torch.randn(4, 3), torch.randn(CLASSES, 3)
    logits = mix(x, PARTNERS, 0.0) @ weight.T
    torch.testing.assert_close(mixed_loss(logits, Y, PARTNERS, 0.0), F.cross_entropy(x @ weight.T, Y))


def test_a_small_alpha_mixes_almost_nothing() -> None:
    """Shares are zeros and ones, and both are the plain batch."""
    client, methods = site("a", digits()), [{"name": "fedavg"}, {"name": "mixup", "alpha": 1e-3}]
    plans = [plan_for(method, training={"epochs": 3}) for method in methods]
    plain, mixed = (client_half(plan).train(first_task(plan, client), {}, Workplace(client.train))[0] for plan in plans)
    torch.testing.assert_close(mixed.shared, plain.shared, rtol=1e-4, atol=1e-6)


def test_alpha_zero_is_fedavg_to_the_bit_and_alpha_one_is_not() -> None:
    client, fedavg = site("a", digits()), plan_for({"name": "fedavg"})
    task = first_task(fedavg, client)
    plain, _ = client_half(fedavg).train(task, {}, Workplace(client.train))
    for alpha, same in ((0.0, True), (1.0, False)):
        plan = plan_for({"name": "mixup", "alpha": alpha})
        mixed, private = client_half(plan).train(task, {}, Workplace(client.train))
        assert private == {}
        assert differ(mixed.shared, plain.shared) is not same


def test_a_batch_of_one_image_is_not_changed() -> None:
    client, fedavg = site("a", digits(1)), plan_for({"name": "fedavg"})
    plain, _ = client_half(fedavg).train(first_task(fedavg, client), {}, Workplace(client.train))
    plan = plan_for({"name": "mixup"})
    mixed, _ = client_half(plan).train(first_task(plan, client), {}, Workplace(client.train))
    for name, value in plain.shared.items():
        torch.testing.assert_close(mixed.shared[name], value)


def test_every_batch_round_and_client_has_a_draw_of_its_own_which_is_repeatable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, client = plan_for({"name": "mixup"}), site("a", digits())
    task, drawn = first_task(plan, client), list[tuple[float, list[int]]]()

    def listening(x: Tensor, partners: Tensor, share: float) -> Tensor:
        drawn.append((share, partners.tolist()))
        return mix(x, partners, share)

    monkeypatch.setattr("shared.methods.mixup.mix", listening)
    for one in (task, task, replace(task, round=2), replace(task, client_id="b")):
        client_half(plan).train(one, {}, Workplace(client.train))
    first, again, later, other = (drawn[start : start + 3] for start in range(0, 12, 3))
    assert first == again
    different = [*first, *later, *other]
    assert len({share for share, _ in different}) == len({tuple(partners) for _, partners in different}) == 9
    assert all(sorted(partners) == list(range(8)) for _, partners in different)


def test_it_learns() -> None:
    plan, client = plan_for({"name": "mixup"}, training={"lr": 0.1}), site("a", digits())
    simulation = Simulation(plan, [client])
    accuracies = [simulation.run_round().pooled.accuracy or 0.0 for _ in range(8)]
    assert accuracies[-1] > 0.7
