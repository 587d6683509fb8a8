"""Small deep networks for experiments, as backbones: `lab.networks:deep` and `lab.networks:deep_normed`.

ResNet18 needs more rounds from random weights than an ordinary computer has time for. These two have eight
convolutions, and differ from each other by BatchNorm alone.
"""

from torch import nn

_STAGES = ((8, 16), (16, 32), (32, 64), (64, 64))  # a pooling stands between two of them


def deep(channels: int, height: int, width: int) -> nn.Module:
    """Eight 3×3 convolutions and a mean over places: 64 features."""
    del height, width
    return _network(channels, normed=False)


def deep_normed(channels: int, height: int, width: int) -> nn.Module:
    """The same with BatchNorm behind each convolution."""
    del height, width
    return _network(channels, normed=True)


def _network(channels: int, *, normed: bool) -> nn.Module:
    layers: list[nn.Module] = []
    for number, stage in enumerate(_STAGES):
        layers += [nn.MaxPool2d(2, ceil_mode=True)] if number else []
        for width in stage:
            convolution = nn.Conv2d(channels, width, 3, padding=1)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")  # or eight layers without norm fade out
            layers += [convolution, *([nn.BatchNorm2d(width)] if normed else []), nn.ReLU(inplace=True)]
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
