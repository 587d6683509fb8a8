import math

import pytest
import torch
import torch.nn.functional as F
from support.halves import server_half
from support.tensors import assert_same_tensors, differ
from support.tiny import NORMED, digits, first_task, plan_for, site
from torch import Tensor

from lab.simulation.simulation import Simulation
from shared.contract.seeds import derive_seed
from shared.learning.methods import client_half
from shared.learning.methods.base import RoundContext, TrainingContext
from shared.learning.methods.moon import MoonModel, contrast
from shared.learning.methods.tensor_half import TensorState
from shared.learning.methods.training_loop import make_sgd, mean_loss
from shared.learning.model import build_single
from shared.learning.runtime import Runtime
from shared.tensors.names import strip_prefix

MOON = {"name": "moon", "projection_dim": 8}


class TestTheTerm:
    def test_term_matches_the_value_worked_out_by_hand(self) -> None:
        """z = z_g = (1, 0), z_p = (0, 1), τ = ½: log(1 + e⁻²)."""
        z, other = torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[0.0, 1.0]]).double()
        assert contrast(z, z, [other], 0.5).item() == pytest.approx(0.1269280110, abs=1e-10)

    def test_earlier_model_equal_to_the_global_one_gives_log_2_and_no_gradient(self) -> None:
        z = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
        other = torch.randn(3, 5, dtype=torch.float64)
        value = contrast(z, other, [other], 0.5)
        (gradient,) = torch.autograd.grad(value, z)
        assert value.item() == pytest.approx(math.log(2))
        assert float(gradient.abs().max()) < 1e-15

    def test_term_and_gradient_are_zero_without_earlier_models(self) -> None:
        z = torch.randn(3, 5, requires_grad=True)
        value = contrast(z, torch.randn(3, 5), [], 0.5)
        assert (value.item(), float(torch.autograd.grad(value, z)[0].abs().max())) == (0, 0)

    def test_several_earlier_models_are_summed(self) -> None:
        z, other = torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[0.0, 1.0]]).double()
        assert contrast(z, z, [other, other], 0.5).item() == pytest.approx(math.log(1 + 2 * math.exp(-2)))


def fedavg_on_the_same_net(plan_method: dict[str, object], backbone: str) -> dict[str, Tensor]:
    """Train MOON's network with plain SGD for one round."""
    plan, client = plan_for(plan_method, backbone), site("a", digits())
    net = MoonModel(plan).train()
    optimizer = make_sgd(net, plan.training)
    for x, y in client.train.batches(8, derive_seed(plan.seed, "batches", "a", 1, 0)):
        optimizer.zero_grad()
        mean_loss(net(x)[0], y).backward()
        optimizer.step()
    return net.state_dict()


@pytest.mark.parametrize("backbone", ["lenet", NORMED])
def test_zero_mu_equals_fedavg_to_the_bit(backbone: str) -> None:
    method = {**MOON, "mu": 0.0}
    plan, client = plan_for(method, backbone), site("a", digits())
    earlier = {
        f"previous.0.{name}": value + 0.1
        for name, value in server_half(plan).initial_state().shared.items()
        if value.is_floating_point()
    }
    earlier |= {
        f"previous.0.{name}": value
        for name, value in server_half(plan).initial_state().shared.items()
        if not value.is_floating_point()
    }
    update, _ = client_half(plan).train(first_task(plan, client), earlier, TrainingContext(client.train))
    assert_same_tensors(update.shared, fedavg_on_the_same_net(method, backbone))


def test_client_omits_the_term_in_its_first_round() -> None:
    plan, client = plan_for({**MOON, "mu": 5.0}), site("a", digits())
    update, kept = client_half(plan).train(first_task(plan, client), {}, TrainingContext(client.train))
    assert_same_tensors(update.shared, fedavg_on_the_same_net(MOON, "lenet"))
    assert_same_tensors({name.removeprefix("previous.0."): value for name, value in kept.items()}, update.shared)


@pytest.mark.parametrize("backbone", ["lenet", NORMED])
def test_term_counts_from_the_second_round_on_without_updating_statistics(backbone: str) -> None:
    client = site("a", digits())
    plan, other = plan_for({**MOON, "mu": 5.0}, backbone), plan_for({**MOON, "mu": 0.0}, backbone)
    task = first_task(plan, client)
    _, kept = client_half(plan).train(task, {}, TrainingContext(client.train))
    pulled, _ = client_half(plan).train(task, kept, TrainingContext(client.train))
    free, _ = client_half(other).train(task, kept, TrainingContext(client.train))
    assert differ(pulled.shared, free.shared)
    if backbone == NORMED:
        counter = "backbone.1.num_batches_tracked"
        assert pulled.shared[counter].item() == free.shared[counter].item() == 3


@pytest.mark.parametrize("backbone", ["lenet", NORMED])
def test_later_round_matches_plain_pytorch(backbone: str) -> None:
    """z is pulled toward the global model's and away from the client's last model's; both are frozen."""
    plan, client = plan_for({**MOON, "mu": 2.0, "temperature": 0.3}, backbone), site("a", digits())
    task = first_task(plan, client)
    _, kept = client_half(plan).train(task, {}, TrainingContext(client.train))
    update, _ = client_half(plan).train(task, kept, TrainingContext(client.train))
    net, of_round, of_before = (MoonModel(plan) for _ in range(3))
    of_round.eval()
    of_before.eval().load_state_dict(strip_prefix(kept, "previous.0."))
    optimizer = make_sgd(net, plan.training)
    for x, y in client.train.batches(8, derive_seed(plan.seed, "batches", "a", 1, 0)):
        logits, z = net(x)
        near, far = (F.cosine_similarity(z, other.project(x).detach()) / 0.3 for other in (of_round, of_before))
        term = -torch.log(near.exp() / (near.exp() + far.exp())).mean()
        optimizer.zero_grad()
        (mean_loss(logits, y) + 2 * term).backward()
        optimizer.step()
    torch.testing.assert_close(update.shared, dict(net.state_dict()), rtol=1e-4, atol=1e-6)


def test_pool_holds_the_newest_models_first() -> None:
    plan = plan_for({**MOON, "previous_models": 2})
    simulation = Simulation(plan, [site("a", digits(8))])
    seen = []
    for _ in range(3):
        simulation.run_round()
        seen.append(simulation.state.shared)  # a single client's model is the global one
    private = simulation.clients[0].private
    for number, model in enumerate([seen[2], seen[1]]):
        assert_same_tensors({name: private[f"previous.{number}.{name}"] for name in model}, model)
    assert len(private) == 2 * len(seen[0])


def test_predictions_come_from_the_global_model() -> None:
    plan = plan_for(MOON)
    simulation = Simulation(plan, [site("a", digits(8)), site("b", digits(8, 8))])
    simulation.run_round()
    net = MoonModel(plan).eval()
    net.load_state_dict(simulation.state.shared)
    images = digits(8).images
    for client in simulation.clients:
        predictor = simulation.client.predictor(simulation.task(client), client.private, Runtime())
        assert torch.equal(predictor(images), net(images)[0])


def test_projection_adds_the_published_number_of_parameters() -> None:
    """+391,424 parameters on ResNet18 with 10 classes, as in the published code, and their bytes on the wire."""
    plan, fedavg = (plan_for({"name": name}, "resnet18", classes=list("0123456789")) for name in ("moon", "fedavg"))
    with torch.device("meta"):
        more = sum(value.numel() for value in MoonModel(plan).parameters())
        plain = sum(value.numel() for value in build_single(plan).parameters())
    assert more - plain == 391_424
    more, plain = (server_half(one).update_spec({}).data_bytes for one in (plan, fedavg))
    assert more - plain == 1_565_696


def test_backbone_starts_with_the_same_weights_as_in_every_method() -> None:
    plan = plan_for(MOON)
    moon, single = server_half(plan).initial_state().shared, build_single(plan).state_dict()
    assert all(torch.equal(moon[name], value) for name, value in single.items() if name.startswith("backbone."))


def test_server_momentum_delays_and_then_carries_on_changes() -> None:
    server = server_half(plan_for({**MOON, "server_momentum": 0.5}))
    others = {"count": torch.tensor([3]), "bn.running_var": torch.tensor([0.5])}
    state = TensorState({name: value + 1 for name, value in others.items()} | {"w": torch.tensor([4.0])})
    state = server.finish(state, {"w": torch.tensor([2.0]), **others}, [], RoundContext([], {}))
    assert state.shared["w"].item() == 3  # 4 − ½ (4 − 2)
    assert_same_tensors(
        {name: state.shared[name] for name in others}, others
    )  # statistics are averaged without momentum
    state = server.finish(state, {"w": torch.tensor([3.0]), **others}, [], RoundContext([], {}))
    assert state.shared["w"].item() == 2.5  # 3 − (½ × 1 + ½ × 0)
