import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.tiny import CLASSES, assert_equal, differ, digits, first_task, plan_for, site

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


def test_a_small_alpha_draws_almost_only_zeros_and_ones() -> None:
    shares = np.random.default_rng(0).beta(1e-3, 1e-3, 2000)
    assert np.isfinite(shares).all()
    assert np.mean(np.minimum(shares, 1 - shares) < 1e-6) > 0.97


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


def test_it_learns_and_each_round_draws_anew() -> None:
    plan, client = plan_for({"name": "mixup"}, training={"lr": 0.1}), site("a", digits())
    task, half = first_task(plan, client), client_half(plan)
    first, _ = half.train(task, {}, Workplace(client.train))
    again, _ = half.train(task, {}, Workplace(client.train))
    assert_equal(first.shared, again.shared)
    simulation = Simulation(plan, [client])
    accuracies = [simulation.run_round().pooled.accuracy or 0.0 for _ in range(8)]
    assert accuracies[-1] > 0.7
