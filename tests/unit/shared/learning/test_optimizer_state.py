import torch
from torch import nn

from shared.learning.optimizer_state import optimizer_tensors, restore_optimizer


def trained(momentum: float = 0.5) -> tuple[nn.Linear, torch.optim.SGD]:
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return net, optimizer


def test_tensors_are_copies_named_after_key_and_parameter() -> None:
    net, optimizer = trained()
    stored = optimizer_tensors(optimizer, net)
    assert stored.keys() == {"momentum_buffer:weight", "momentum_buffer:bias"}
    optimizer.step()
    assert stored["momentum_buffer:weight"].tolist() == [[1.0, 1.0]]


def test_restored_optimizer_takes_the_same_steps() -> None:
    net, optimizer = trained()
    other = nn.Linear(2, 1)
    other.load_state_dict(net.state_dict())
    fresh = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.5)
    restore_optimizer(fresh, other, optimizer_tensors(optimizer, net))
    for model, stepper in ((net, optimizer), (other, fresh)):
        stepper.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        stepper.step()
    assert torch.equal(net.weight, other.weight)


def test_optimizer_without_state_has_no_tensors() -> None:
    net, optimizer = trained(momentum=0)
    assert optimizer_tensors(optimizer, net) == {}
