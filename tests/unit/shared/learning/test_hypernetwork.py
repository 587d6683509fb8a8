from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared.contract.method_options import PFedHNOptions
from shared.contract.plan import validate_plan
from shared.learning.hypernetwork import Hypernetwork, embedding_dim
from shared.learning.methods.pfedhn_server import PFedHNServer
from shared.tensors.arrays import as_tensors

Tensors = dict[str, Tensor]
SHAPES = {"conv.weight": (2, 1, 3, 3), "conv.bias": (2,)}
CLIENTS = ["a", "b", "c"]


def network(**options: Any) -> Hypernetwork:
    plain = {"hidden": 8, "embedding_dim": 3, "momentum": 0.0, "weight_decay": 0.0}
    return Hypernetwork(SHAPES, PFedHNOptions(**{**plain, **options}), seed=5)


def begun(net: Hypernetwork, clients: list[str] = CLIENTS) -> Tensors:
    return net.complete(net.initial(), clients)


def random_delta(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def flat(tensors: Tensors) -> Tensor:
    return torch.cat([tensors[name].reshape(-1) for name in SHAPES])


def test_parameter_counts_match_the_authors_network() -> None:
    """Their network on 3×32×32 images of 10 classes, for 10 clients."""
    plan = validate_plan(
        {
            "name": "sizes",
            "classes": [str(number) for number in range(10)],
            "image": {"height": 32, "width": 32},
            "model": {"backbone": "cnn"},
            "method": {"name": "pfedhn"},
        }
    )
    server = PFedHNServer(plan)
    assert sum(entry.size_bytes for entry in server.update_spec({}).entries.values()) == 4 * 121_182
    assert server.hypernetwork.head_bytes == 4 * 101 * 121_182
    state = server.hypernetwork.complete(
        as_tensors(server.initial_state().private), [str(number) for number in range(10)]
    )
    assert sum(value.numel() for value in state.values()) == 12_270_112


@pytest.mark.parametrize(("clients", "width"), [(10, 3), (50, 13), (100, 26), (500, 126)])
def test_embedding_width_follows_the_number_of_clients(clients: int, width: int) -> None:
    assert embedding_dim(clients) == width


def test_gradient_of_the_linear_case_is_an_outer_product() -> None:
    """One layer and a head: θ = H (W v + b) + c."""
    net = network(hidden_layers=0)
    state, delta = begun(net), random_delta()
    found = net.gradient(state, "b", delta)
    v, first = state["embedding.b"], state["phi.layer.0.weight"]
    x = first @ v + state["phi.layer.0.bias"]
    pulled = torch.zeros_like(x)
    for name, value in delta.items():
        torch.testing.assert_close(found[f"phi.head.{name}.weight"], torch.outer(value.reshape(-1), x))
        torch.testing.assert_close(found[f"phi.head.{name}.bias"], value.reshape(-1))
        pulled += state[f"phi.head.{name}.weight"].T @ value.reshape(-1)
    torch.testing.assert_close(found["phi.layer.0.weight"], torch.outer(pulled, v))
    torch.testing.assert_close(found["embedding.b"], first.T @ pulled)
    assert "embedding.a" not in found


def test_gradient_belongs_to_half_the_squared_distance_to_the_trained_model() -> None:
    net = network()
    state, delta = begun(net), random_delta()
    leaves = {name: value.clone().requires_grad_() for name, value in state.items()}
    made = net.generate(leaves, "a")
    trained = {name: (made[name] - delta[name]).detach() for name in made}
    sum(0.5 * (made[name] - trained[name]).square().sum() for name in made).backward()  # type: ignore[union-attr]
    found = net.gradient(state, "a", delta)
    for name, value in found.items():
        torch.testing.assert_close(value, leaves[name].grad)


def test_step_moves_the_client_s_model_toward_the_trained_one() -> None:
    net = network(lr=1e-3)
    state, delta = begun(net), random_delta()
    before, after = net.generate(state, "a"), net.generate(net.apply_updates(state, [("a", delta)]), "a")
    assert float((flat(after) - flat(before)) @ -flat(delta)) > 0


def test_nothing_moves_without_delta_decay_and_momentum() -> None:
    net = network()
    state = begun(net)
    after = net.apply_updates(state, [("a", {name: torch.zeros(shape) for name, shape in SHAPES.items()})])
    assert after.keys() == state.keys()
    assert all(torch.equal(after[name], value) for name, value in state.items())


@pytest.mark.parametrize("clip_norm", [50.0, 0.1])
def test_steps_match_torch_s_sgd_with_decay_and_momentum_on_every_embedding(clip_norm: float) -> None:
    net = network(momentum=0.9, weight_decay=1e-2, lr=0.05, embedding_lr=0.2, clip_norm=clip_norm)
    state = begun(net)
    parameters = {name: nn.Parameter(value.clone()) for name, value in state.items()}
    rows = [value for name, value in parameters.items() if name.startswith("embedding.")]
    weights = [value for name, value in parameters.items() if name.startswith("phi.")]
    optimizer = torch.optim.SGD(
        [{"params": weights}, {"params": rows, "lr": 0.2}], lr=0.05, momentum=0.9, weight_decay=1e-2
    )
    for number, client in enumerate(["a", "c", "a"]):
        delta = random_delta(number)
        made = net.generate(dict(parameters), client)
        grads = torch.autograd.grad(
            list(made.values()), list(parameters.values()), [delta[name] for name in made], allow_unused=True
        )
        for parameter, grad in zip(parameters.values(), grads, strict=True):
            parameter.grad = torch.zeros_like(parameter) if grad is None else grad
        nn.utils.clip_grad_norm_(list(parameters.values()), clip_norm)
        optimizer.step()
        state = net.apply_updates(state, [(client, delta)])
    for name, parameter in parameters.items():
        torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-4, atol=1e-6)
    assert not torch.equal(state["embedding.b"], begun(net)["embedding.b"])  # although b did not take part


def test_upload_rules_agree_for_one_client_per_round_and_differ_for_two() -> None:
    one, two = network(momentum=0.9), network(momentum=0.9, uploads="mean")
    state, first, second = begun(one), ("a", random_delta(1)), ("b", random_delta(2))
    for name, value in one.apply_updates(state, [first]).items():
        assert torch.equal(value, two.apply_updates(state, [first])[name])
    sequential, mean = one.apply_updates(state, [first, second]), two.apply_updates(state, [first, second])
    assert not torch.equal(sequential["phi.layer.1.weight"], mean["phi.layer.1.weight"])
    halves = [one.gradient(state, *upload)["phi.layer.1.bias"] / 2 for upload in (first, second)]
    torch.testing.assert_close(mean["phi.layer.1.bias"], state["phi.layer.1.bias"] - 1e-2 * sum(halves))


def test_models_are_equal_exactly_for_equal_embeddings() -> None:
    net = network()
    state = begun(net)
    assert not torch.equal(flat(net.generate(state, "a")), flat(net.generate(state, "b")))
    state["embedding.b"] = state["embedding.a"]
    assert torch.equal(flat(net.generate(state, "a")), flat(net.generate(state, "b")))


def test_late_client_gets_the_same_embedding_and_changes_nothing_else() -> None:
    net = network(embedding_dim=None)
    early = begun(net, [str(number) for number in range(10)])
    assert early["phi.layer.0.weight"].shape == (8, 3)
    later = net.complete(early, ["late"])
    assert later.keys() - early.keys() == {"embedding.late"}
    assert torch.equal(later["embedding.late"], net.complete(early, ["late", "0"])["embedding.late"])


@pytest.mark.parametrize("uploads", ["sequential", "mean"])
def test_round_modifies_neither_the_previous_state_nor_the_uploads(uploads: str) -> None:
    net = network(momentum=0.9, uploads=uploads, clip_norm=0.1)
    state, deltas = net.apply_updates(begun(net), [("a", random_delta())]), [random_delta(1), random_delta(2)]
    before = {name: value.clone() for name, value in state.items()}
    first = net.apply_updates(state, zip("ab", deltas, strict=True))
    again = net.apply_updates(state, zip("ab", deltas, strict=True))
    assert all(torch.equal(state[name], value) for name, value in before.items())
    assert all(torch.equal(first[name], value) for name, value in again.items())
    for seed, delta in enumerate(deltas, start=1):
        assert torch.equal(flat(delta), flat(random_delta(seed)))
