import pytest
import torch
from torch import Tensor, nn

from shared.batchnorm import add_auxiliary, using

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))


def paired() -> nn.Module:
    """A layer whose twin doubles what it makes."""
    net = add_auxiliary(nn.Sequential(nn.BatchNorm1d(3)))
    net.state_dict()["0.auxiliary.weight"].fill_(2.0)
    return net


def plain(x: Tensor) -> Tensor:
    return nn.BatchNorm1d(3)(x)


def test_images_go_through_the_layers_that_are_asked_for_and_afterwards_through_the_main_ones() -> None:
    net = paired()
    torch.testing.assert_close(net(X), plain(X))
    with using(net, "auxiliary"):
        torch.testing.assert_close(net(X), 2 * plain(X))
    torch.testing.assert_close(net(X), plain(X))
    with using(net, "halves"):
        torch.testing.assert_close(net(X), torch.cat([plain(X[:3]), 2 * plain(X[3:])]))
    torch.testing.assert_close(net(X), plain(X))


def test_the_main_layers_are_back_after_an_error_too() -> None:
    net = paired()
    with pytest.raises(ValueError, match="interrupted"), using(net, "auxiliary"):
        raise ValueError("interrupted")
    torch.testing.assert_close(net(X), plain(X))


def test_only_the_layer_that_is_used_moves_its_running_statistics() -> None:
    net, main, auxiliary = paired(), nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    with using(net, "halves"):
        net(X)
    with using(net, "auxiliary"):
        net(X)
    main(X[:3])
    auxiliary(X[3:])
    auxiliary(X)
    for prefix, layer in (("0.", main), ("0.auxiliary.", auxiliary)):
        for name, value in layer.named_buffers():
            torch.testing.assert_close(net.state_dict()[prefix + name], value)
