"""Small deep backbones for experiments: `lab.networks:deep` and `lab.networks:deep_normed`.

From random weights, ResNet18 needs more rounds than an ordinary computer can run. These two have eight convolutions
each and differ only in BatchNorm.
"""

from torch import nn

_STAGES = ((8, 16), (16, 32), (32, 64), (64, 64))  # with pooling between stages


def deep(channels: int, height: int, width: int) -> nn.Module:
    """Return eight 3×3 convolutions and a mean over positions: 64 features."""
    del height, width
    return _network(channels, normed=False)


def deep_normed(channels: int, height: int, width: int) -> nn.Module:
    """Return the same network with BatchNorm after each convolution."""
    del height, width
    return _network(channels, normed=True)


def _network(channels: int, *, normed: bool) -> nn.Module:
    layers: list[nn.Module] = []
    for number, stage in enumerate(_STAGES):
        layers += [nn.MaxPool2d(2, ceil_mode=True)] if number else []
        for width in stage:
            convolution = nn.Conv2d(channels, width, 3, padding=1)
            nn.init.kaiming_normal_(
                convolution.weight, nonlinearity="relu"
            )  # else the signal fades in eight layers without norm
            layers += [convolution, *([nn.BatchNorm2d(width)] if normed else []), nn.ReLU(inplace=True)]
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
