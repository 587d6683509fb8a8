"""BatchNorm in pairs: a second layer beside each one, for images of another kind that go through the same network."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Use = Literal["main", "auxiliary", "halves"]


class _Twin(_BatchNorm):
    """BatchNorm with a second layer; mixed with BatchNorm1d … 3d, whose place it takes."""

    auxiliary: _BatchNorm
    use: Use = "main"

    def forward(self, x: Tensor) -> Tensor:
        """Through the main layer, through the auxiliary one, or each half of the batch through its own."""
        if self.use == "main":
            return super().forward(x)
        if self.use == "auxiliary":
            return self.auxiliary(x)  # type: ignore[no-any-return]
        half = x.shape[0] // 2
        return torch.cat([super().forward(x[:half]), self.auxiliary(x[half:])])


class _Twin1d(_Twin, nn.BatchNorm1d):
    pass


class _Twin2d(_Twin, nn.BatchNorm2d):
    pass


class _Twin3d(_Twin, nn.BatchNorm3d):
    pass


_TWINS: dict[type[nn.Module], type[_Twin]] = {
    nn.BatchNorm1d: _Twin1d,
    nn.BatchNorm2d: _Twin2d,
    nn.BatchNorm3d: _Twin3d,
}


def add_auxiliary(net: nn.Module) -> nn.Module:
    """Give every BatchNorm layer its twin, in place; the twin starts as the layer itself."""
    for name, child in list(net.named_children()):
        if type(child) in _TWINS and isinstance(child, _BatchNorm):
            settings = (child.num_features, child.eps, child.momentum, child.affine, child.track_running_stats)
            twin = _TWINS[type(child)](*settings)
            auxiliary = type(child)(*settings)
            for layer in (twin, auxiliary):
                layer.load_state_dict(child.state_dict())
            twin.auxiliary = auxiliary
            setattr(net, name, twin)
        else:
            add_auxiliary(child)
    return net


def use_layers(net: nn.Module, which: Use) -> None:
    """From now on layers with twins use what is asked for."""
    for layer in net.modules():
        if isinstance(layer, _Twin):
            layer.use = which


@contextmanager
def using(net: nn.Module, which: Use) -> Iterator[None]:
    """Inside, layers with twins use what is asked for; afterwards, the main ones."""
    use_layers(net, which)
    try:
        yield
    finally:
        use_layers(net, "main")
