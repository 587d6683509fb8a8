"""BatchNorm in pairs: an auxiliary layer next to each one, for images of another kind in the same network."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Use = Literal["main", "auxiliary", "halves"]


class _Twin(_BatchNorm):
    """BatchNorm with an auxiliary layer; a mixin for BatchNorm1d to 3d, which it replaces."""

    auxiliary: _BatchNorm
    use: Use = "main"

    def forward(self, x: Tensor) -> Tensor:
        """Apply the main layer, the auxiliary one, or one to each half of the batch."""
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
    """Add an auxiliary layer to every BatchNorm layer, in place, starting as a copy of it."""
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
    """Select the layers that paired BatchNorm applies from now on."""
    for layer in net.modules():
        if isinstance(layer, _Twin):
            layer.use = which


@contextmanager
def using(net: nn.Module, which: Use) -> Iterator[None]:
    """Select the layers that paired BatchNorm applies inside the block; the main ones afterward."""
    use_layers(net, which)
    try:
        yield
    finally:
        use_layers(net, "main")
