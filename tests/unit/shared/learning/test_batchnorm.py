import pytest
import torch
from torch import Tensor, nn

from shared.learning.batchnorm import add_auxiliary, using

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))


def paired() -> nn.Module:
    """Return a layer whose auxiliary layer doubles its output."""
    net = add_auxiliary(nn.Sequential(nn.BatchNorm1d(3)))
    net.state_dict()["0.auxiliary.weight"].fill_(2.0)
    return net


def plain(x: Tensor) -> Tensor:
    return nn.BatchNorm1d(3)(x)


def test_selected_layers_apply_inside_the_block_and_the_main_ones_afterwards() -> None:
    net = paired()
    torch.testing.assert_close(net(X), plain(X))
    with using(net, "auxiliary"):
        torch.testing.assert_close(net(X), 2 * plain(X))
    torch.testing.assert_close(net(X), plain(X))
    with using(net, "halves"):
        torch.testing.assert_close(net(X), torch.cat([plain(X[:3]), 2 * plain(X[3:])]))
    torch.testing.assert_close(net(X), plain(X))


def test_main_layers_are_selected_again_after_an_error() -> None:
    net = paired()
    with pytest.raises(ValueError, match="interrupted"), using(net, "auxiliary"):
        raise ValueError("interrupted")
    torch.testing.assert_close(net(X), plain(X))


def test_only_the_applied_layer_updates_its_running_statistics() -> None:
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
