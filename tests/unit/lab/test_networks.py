from collections.abc import Callable

import pytest
import torch
from torch import nn

from lab.networks import deep, deep_normed
from shared.contract.plan import ImagePlan
from shared.learning.backbones import build_backbone


@pytest.mark.parametrize("make", [deep, deep_normed])
@pytest.mark.parametrize(("channels", "side"), [(1, 8), (1, 28), (3, 32)])
def test_features_neither_vanish_nor_explode_after_eight_convolutions(
    make: Callable[[int, int, int], nn.Module], channels: int, side: int
) -> None:
    image = ImagePlan(channels=channels, height=side, width=side, mean=(0.5,) * channels, std=(0.5,) * channels)
    backbone = build_backbone(f"lab.networks:{make.__name__}", image)
    assert backbone.features == 64
    assert sum(isinstance(layer, nn.Conv2d) for layer in backbone.net) == 8  # type: ignore[attr-defined]
    features = backbone.net(torch.randn(16, channels, side, side))
    assert 0.05 < float(features.detach().std()) < 5


def test_the_two_networks_differ_only_in_batchnorm() -> None:
    plain, normed = (list(make(3, 32, 32)) for make in (deep, deep_normed))  # type: ignore[call-overload]
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in normed) == 8
    assert [repr(layer) for layer in normed if not isinstance(layer, nn.BatchNorm2d)] == [repr(one) for one in plain]
