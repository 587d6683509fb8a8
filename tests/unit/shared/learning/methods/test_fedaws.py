import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.halves import server_half
from support.simulating import evaluate_all
from support.tensor_data import TensorData
from support.tensors import assert_same_tensors
from support.tiny import CLASSES, digits, first_task, plan_for, site
from torch import Tensor

from lab.simulation.simulation import SimulatedClient, Simulation
from shared.contract.method_options import FedAwSOptions
from shared.contract.seeds import derive_seed
from shared.learning.methods import client_half, fedaws_server
from shared.learning.methods.base import ClientRecord, RoundContext, TrainingContext
from shared.learning.methods.fedaws import FeatureNet, positive_loss
from shared.learning.methods.tensor_half import TensorState
from shared.learning.methods.training_loop import make_sgd
from shared.learning.runtime import Runtime
from shared.tensors.arrays import as_array, as_tensor
from shared.tensors.names import Tensors

PAIR = torch.tensor([[1.0, 0.0], [0.5, math.sqrt(3) / 2]], dtype=torch.float64)


def spread_gradient(rows: Tensor, *arguments: Any, **options: Any) -> Tensor:
    return as_tensor(fedaws_server.spread_gradient(as_array(rows), *arguments, **options))


def spread_out(rows: Tensor, rate: float, options: FedAwSOptions) -> Tensor:
    return as_tensor(fedaws_server.spread_out(as_array(rows), rate, options))


def spread_loss(rows: Tensor, margin: float, scale: float = 1.0) -> Tensor:
    """Return Σ_c Σ_{c' ≠ c} max(0, margin − scale × (1 − cos))² of unit rows, the loss behind `spread_gradient`."""
    others = ~torch.eye(len(rows), dtype=torch.bool)
    return ((margin - scale * (1 - rows @ rows.T)).clamp(min=0).square() * others).sum()


def plan(**method: Any):  # type: ignore[no-untyped-def]
    return plan_for({"name": "fedaws", **method})


def of_class(label: int, count: int = 12) -> TensorData:
    data = digits(120)
    kept = data.labels == label
    return TensorData(data.images[kept][:count], data.labels[kept][:count])


def one_class_sites() -> list[SimulatedClient]:
    return [site(f"site-{label}", of_class(label)) for label in range(CLASSES)]


class TestRows:
    """W = [(1, 0), (½, √3/2)], ν = 0.9."""

    def test_loss_and_gradient_match_values_worked_out_by_hand(self) -> None:
        assert spread_loss(PAIR, 0.9).item() == pytest.approx(0.32)
        found = spread_gradient(PAIR, 0.9)
        expected = torch.tensor([[0.0, 1.38564], [1.2, -0.69282]], dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

    def test_step_matches_values_worked_out_by_hand(self) -> None:
        after = spread_out(PAIR, 0.1, FedAwSOptions())
        assert float(after[0] @ after[1]) == pytest.approx(0.24568, abs=1e-5)
        torch.testing.assert_close(after.norm(dim=1), torch.ones(2))

    def test_gradient_belongs_to_the_loss_and_is_orthogonal_to_the_rows(self) -> None:
        rows = torch.nn.functional.normalize(torch.randn(6, 4, dtype=torch.float64), dim=1)
        leaf = rows.clone().requires_grad_()
        spread_loss(torch.nn.functional.normalize(leaf, dim=1), 0.9).backward()
        found = spread_gradient(rows, 0.9)
        torch.testing.assert_close(found, leaf.grad)
        assert float((found * rows).sum(dim=1).abs().max()) < 1e-12

    def test_orthonormal_rows_are_far_enough_apart(self) -> None:
        rows = torch.eye(5)
        assert spread_loss(rows, 0.9).item() == 0
        assert not spread_gradient(rows, 0.9).any()

    def test_equal_rows_stay_equal(self) -> None:
        rows = torch.tensor([[0.6, 0.8]]).repeat(3, 1)
        assert spread_loss(rows, 0.9).item() > 0
        assert float(spread_gradient(rows, 0.9).abs().max()) < 1e-6

    @pytest.mark.parametrize("nearest", [None, 3])
    def test_single_class_does_not_move(self, nearest: int | None) -> None:
        row = torch.tensor([[0.6, 0.8]])
        assert spread_loss(row, 0.9).item() == 0
        torch.testing.assert_close(spread_out(row, 0.5, FedAwSOptions(nearest=nearest)), row)

    def test_only_the_nearest_rows_push(self) -> None:
        rows = torch.tensor([[1.0, 0.0], [0.8, 0.6], [-1.0, 0.0]], dtype=torch.float64)
        found = spread_gradient(rows, 0.9, nearest=1)
        # 0 and 1 are each other's nearest; 1 is also nearest to 2.
        torch.testing.assert_close(found[0], 4 * (rows[1] - 0.8 * rows[0]))
        torch.testing.assert_close(found[2], 2 * (rows[1] + 0.8 * rows[2]))


@pytest.mark.parametrize(("cosine", "loss", "slope"), [(0.6, 0.09, -0.6), (0.9, 0.0, 0.0), (0.95, 0.0, 0.0)])
def test_client_loss_is_zero_beyond_the_margin(cosine: float, loss: float, slope: float) -> None:
    cosines = torch.tensor([cosine], dtype=torch.float64, requires_grad=True)
    value = positive_loss(cosines, 0.9)
    value.backward()
    assert (value.item(), cosines.grad.item()) == (pytest.approx(loss), pytest.approx(slope))


def test_initial_rows_are_orthonormal_or_at_least_distinct_unit_vectors() -> None:
    rows = server_half(plan()).initial_state().private["rows"]
    torch.testing.assert_close(rows @ rows.T, torch.eye(CLASSES))
    many = plan_for({"name": "fedaws"}, model={"dense_dim": 3})
    rows = server_half(many).initial_state().private["rows"]
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(CLASSES))
    assert len(rows.unique(dim=0)) == CLASSES


def test_client_receives_its_own_rows_to_train_and_all_rows_to_predict() -> None:
    server = server_half(plan())
    state, record = server.initial_state(), ClientRecord("a", (0, 3, 0, 2))
    sent = server.personal(state, record, RoundContext([record], {}))
    assert sent["classes"].tolist() == [1, 3]
    assert torch.equal(sent["rows"], state.private["rows"][[1, 3]])
    assert torch.equal(sent["evaluation_rows"], state.private["rows"])
    silent = server_half(plan(evaluation_rows=False)).personal(state, record, RoundContext([record], {}))
    assert silent.keys() == {"classes", "rows"}


def test_training_does_not_use_the_rows_for_prediction() -> None:
    client, the_plan = site("a", of_class(1)), plan()
    task = first_task(the_plan, client)
    seen, _ = client_half(the_plan).train(task, {}, TrainingContext(client.train))
    task.personal.pop("evaluation_rows")
    blind, _ = client_half(the_plan).train(task, {}, TrainingContext(client.train))
    assert_same_tensors(seen.personal | seen.shared, blind.personal | blind.shared)
    rows = seen.personal["rows"]
    assert rows[1].norm().item() == pytest.approx(1)
    assert not rows[[0, 2, 3]].any()


@pytest.mark.parametrize("margin", [0.9, 0.02])
def test_client_round_matches_plain_pytorch(margin: float) -> None:
    """SGD on the hinge loss for features and rows; at the lower margin, some images are close enough."""
    the_plan, client = plan(margin=margin), site("a", digits())
    task = first_task(the_plan, client)
    update, _ = client_half(the_plan).train(task, {}, TrainingContext(client.train))
    net, rows = FeatureNet(the_plan), task.personal["rows"].clone().requires_grad_()
    optimizer = make_sgd(net, the_plan.training)
    optimizer.add_param_group({"params": [rows]})
    for x, y in client.train.batches(8, derive_seed(the_plan.seed, "batches", "a", 1, 0)):
        cosines = F.cosine_similarity(net(x), rows[y])
        optimizer.zero_grad()
        F.relu(margin - cosines).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(update.shared, dict(net.state_dict()), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(update.personal["rows"], F.normalize(rows.detach(), dim=1), rtol=1e-4, atol=1e-6)


def finish(the_plan: Any, counts: tuple[int, ...], rows: Tensor, before: Tensor) -> Tensor:
    uploads: list[tuple[ClientRecord, Tensors]] = [(ClientRecord("a", counts), {"rows": rows})]
    state = server_half(the_plan).finish(TensorState({}, {"rows": before}), {}, uploads, RoundContext([], {}))
    return state.private["rows"]


def test_without_spread_rows_are_the_uploaded_ones_and_absent_clients_rows_are_unchanged() -> None:
    before = torch.eye(CLASSES, 100)
    uploaded = torch.eye(CLASSES, 100).roll(50, dims=1)
    after = finish(plan(spread=0.0), (5, 0, 0, 0), uploaded, before)
    assert torch.equal(after[0], uploaded[0])
    assert torch.equal(after[1:], before[1:])  # although the upload has rows for them


@pytest.mark.parametrize("method", [{"spread": 2.0}, {"spread": 1.0, "spread_lr": 0.1}])
def test_spread_out_step_is_lambda_times_the_rate(method: dict[str, float]) -> None:
    """λη = 0.1 on [(1, 0), (½, √3/2)]; the other rows are far enough away."""
    before = torch.eye(CLASSES, 100)
    before[:2, :2] = PAIR
    after = finish(plan(**method), (0, 0, 0, 0), before, before)
    assert float(after[0] @ after[1]) == pytest.approx(0.24568, abs=1e-5)
    torch.testing.assert_close(after[2:], before[2:])


def test_features_are_averaged() -> None:
    simulation = Simulation(plan(spread=0.0), [site("a", of_class(0, 4)), site("b", of_class(1, 8))])
    updates = [
        simulation.client.train(simulation.task(client), {}, TrainingContext(client.train))[0].shared
        for client in simulation.clients
    ]
    simulation.run_round()
    mean = {name: (value + updates[1][name]) / 2 for name, value in updates[0].items()}
    torch.testing.assert_close(simulation.state.shared, mean)


def test_row_of_a_class_is_averaged_over_its_clients() -> None:
    server = server_half(plan(spread=0.0))
    first, second = torch.eye(CLASSES, 100), torch.eye(CLASSES, 100).roll(1, dims=1)
    uploads = [(ClientRecord(name, (1, 0, 0, 0)), {"rows": rows}) for name, rows in (("a", first), ("b", second))]
    state = server.finish(server.initial_state(), {}, uploads, RoundContext([], {}))
    torch.testing.assert_close(state.private["rows"][0, :2], torch.full((2,), math.sqrt(0.5)))


def test_images_of_a_class_without_a_row_do_not_count() -> None:
    the_plan, two = (
        plan(),
        TensorData(
            *(
                torch.cat(parts)
                for parts in zip(*[(d.images, d.labels) for d in (of_class(0, 4), of_class(1, 4))], strict=True)
            )
        ),
    )
    task = first_task(the_plan, site("a", of_class(0, 4)))  # the coordinator knows only about class 0
    update, _ = client_half(the_plan).train(task, {}, TrainingContext(two))
    assert not update.personal["rows"][1:].any()
    nothing, _ = client_half(the_plan).train(task, {}, TrainingContext(of_class(1, 4)))
    assert nothing.report.loss == 0
    assert_same_tensors(nothing.shared, task.shared)


def test_prediction_is_the_nearest_of_the_rows_the_client_knows() -> None:
    client, images = site("a", of_class(2)), digits(8).images
    for the_plan, classes in ((plan(), set(range(CLASSES))), (plan(evaluation_rows=False), {2})):
        task = first_task(the_plan, client)
        net = FeatureNet(the_plan).eval()
        net.load_state_dict(task.shared)
        logits = client_half(the_plan).predictor(task, {}, Runtime())(images)
        rows = server_half(the_plan).initial_state().private["rows"]
        torch.testing.assert_close(logits[:, 2], net(images) @ rows[2] / 0.1)
        assert set(logits.argmax(dim=1).tolist()) <= classes
        assert torch.all(logits[:, [c for c in range(CLASSES) if c not in classes]] == -10)


def test_clients_with_one_class_each_learn_to_distinguish_classes() -> None:
    the_plan = plan_for({"name": "fedaws", "spread": 1.0}, training={"lr": 0.5, "epochs": 2})
    simulation = Simulation(the_plan, one_class_sites())
    outcomes = [simulation.run_round() for _ in range(8)]
    pooled = evaluate_all(simulation).correct / 48
    assert outcomes[-1].reports["site-0"].loss < outcomes[0].reports["site-0"].loss
    assert pooled > 0.6


class TestFedRepo:
    """Cross-entropy over all rows at the clients; many steps with momentum at the coordinator."""

    PLAN = plan_for({}, preset="fedaws-fedrepo", training={"lr": 0.2, "epochs": 2})

    def test_preset_sets_cross_entropy_and_thirty_spread_steps(self) -> None:
        options = self.PLAN.method
        assert isinstance(options, FedAwSOptions)
        assert (options.client_loss, options.spread_steps, options.spread_momentum) == ("cross-entropy", 30, 0.9)

    def test_gradient_of_the_half_distance_belongs_to_its_loss(self) -> None:
        rows = torch.nn.functional.normalize(torch.randn(6, 4, dtype=torch.float64), dim=1)
        leaf = rows.clone().requires_grad_()
        spread_loss(torch.nn.functional.normalize(leaf, dim=1), 0.8, scale=0.5).backward()
        torch.testing.assert_close(spread_gradient(rows, 0.8, scale=0.5), leaf.grad)

    def test_two_steps_with_momentum_on_the_mean_over_all_pairs(self) -> None:
        """The reference is torch's SGD on the mean over all C² entries, including the diagonal."""
        options = FedAwSOptions(
            spread_distance="half-cosine",
            spread_margin=0.8,
            spread_reduction="mean",
            spread_momentum=0.9,
            spread_steps=2,
        )
        rows = PAIR.clone().requires_grad_()
        optimizer = torch.optim.SGD([rows], lr=0.3, momentum=0.9)
        for _ in range(2):
            unit = torch.nn.functional.normalize(rows, dim=1)
            optimizer.zero_grad()
            (0.8 - 0.5 * (1 - unit @ unit.T)).clamp(min=0).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                rows.copy_(torch.nn.functional.normalize(rows, dim=1))
        torch.testing.assert_close(spread_out(PAIR, 0.3, options), rows.detach().float())

    def test_every_client_trains_all_rows_and_all_are_averaged(self) -> None:
        client = site("a", of_class(1))
        task = first_task(self.PLAN, client)
        assert task.personal["classes"].tolist() == list(range(CLASSES))
        update, _ = client_half(self.PLAN).train(task, {}, TrainingContext(client.train))
        rows = update.personal["rows"]
        assert all(not torch.equal(rows[label], task.personal["rows"][label]) for label in range(CLASSES))
        turned = torch.eye(CLASSES, 100).roll(50, dims=1)
        still = plan_for({"spread": 0.0}, preset="fedaws-fedrepo")
        assert torch.equal(finish(still, (5, 0, 0, 0), turned, torch.eye(CLASSES, 100)), turned)

    def test_two_clients_learn_the_digits(self) -> None:
        clients = [site("a", digits(40)), site("b", digits(40, 40))]
        simulation = Simulation(self.PLAN, clients)
        for _ in range(6):
            simulation.run_round()
        assert evaluate_all(simulation).correct / 80 > 0.8
