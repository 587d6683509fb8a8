"""The networks that turn an image into a feature vector, before any classifier.

A backbone is a module that maps (B, C, H, W) to (B, features). Its logits layer is added by `shared.model`. Where the
published network ends in a layer that is itself no classifier of the task (AlexNet's 1000 outputs), that layer is the
`dense` layer of the model, with the default width given here.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torchvision.models
from torch import Tensor, nn

from shared.plan import BUILT_IN_BACKBONES, ImagePlan
from shared.problems import BackboneError


@dataclass(frozen=True)
class Backbone:
    """A feature extractor with the width of its output and of the dense layer that belongs behind it, if any."""

    net: nn.Module
    features: int
    dense_dim: int | None = None


def lenet(image: ImagePlan, activation: str) -> Backbone:
    """The authors' LeNet: two 5×5 convolutions with one pooling between them, 100 features.

    Their code has no activation at all; `activation="relu"` puts one behind each layer.
    """

    def after() -> list[nn.Module]:
        return [nn.ReLU(inplace=True)] if activation == "relu" else []

    height, width = ((side - 4) // 2 - 4 for side in (image.height, image.width))
    layers = [
        nn.Conv2d(image.channels, 6, 5),  # C×H×W → 6×(H−4)×(W−4)
        *after(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        *after(),
        nn.Flatten(),
        nn.Linear(16 * height * width, 100),
        *after(),
    ]
    return Backbone(nn.Sequential(*layers), features=100)


class _AlexNet(nn.Module):
    """torchvision's AlexNet up to and with its second hidden layer: 4096 features."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        net = torchvision.models.alexnet(weights=None)
        self.features = net.features
        if channels != 3:
            self.features[0] = nn.Conv2d(channels, 64, kernel_size=11, stride=4, padding=2)
        self.avgpool = net.avgpool
        self.classifier = net.classifier[:6]

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))  # type: ignore[no-any-return]


def _resnet(build: Callable[..., nn.Module], image: ImagePlan) -> Backbone:
    net = build(weights=None)
    features = net.fc.in_features
    net.fc = nn.Identity()
    if image.channels != 3:
        net.conv1 = nn.Conv2d(image.channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    return Backbone(net, features=int(features))  # type: ignore[arg-type]


def build_backbone(name: str, image: ImagePlan, activation: str = "none") -> Backbone:
    """The named backbone for images of this shape; a BackboneError says what would fit.

    `name` is one of the built-in ones or "package.module:function", where the function takes (channels, height, width)
    and returns a module that maps a batch of images to a batch of feature vectors.
    """
    if name not in BUILT_IN_BACKBONES:
        return _custom(name, image)
    minimum = BUILT_IN_BACKBONES[name]
    if min(image.height, image.width) < minimum:
        raise BackboneError(
            f"{name} cannot take images of {image.height}×{image.width}: its minimum is {minimum}×{minimum}.",
            next_step="Raise image.height and image.width in the plan, or choose another backbone.",
        )
    if name == "lenet":
        return lenet(image, activation)
    if name == "alexnet":
        return Backbone(_AlexNet(image.channels), features=4096, dense_dim=1000)
    return _resnet(getattr(torchvision.models, name), image)


def _custom(name: str, image: ImagePlan) -> Backbone:
    module_name, colon, function_name = name.partition(":")
    if not (colon and module_name and function_name):
        raise BackboneError(
            f"There is no backbone {name!r}.",
            next_step=f'Use one of {", ".join(BUILT_IN_BACKBONES)}, or "package.module:function" for your own.',
        )
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise BackboneError(
            f"The backbone {name!r} cannot be imported: {error}.",
            next_step="Install its package on the coordinator and at every site.",
        ) from error
    try:
        net = function(image.channels, image.height, image.width)
        was_training = net.training
        with torch.no_grad():
            features = net.eval()(torch.zeros(2, image.channels, image.height, image.width))
        net.train(was_training)
    except Exception as error:  # whatever the user's own function raises is theirs to read
        raise BackboneError(
            f"The backbone {name!r} fails on images of {image.channels}×{image.height}×{image.width}: {error}."
        ) from error
    if features.ndim != 2 or features.shape[0] != 2:
        raise BackboneError(
            f"The backbone {name!r} maps 2 images to a tensor of shape {tuple(features.shape)}.",
            next_step="It must return one flat feature vector per image.",
        )
    return Backbone(net, features=features.shape[1])
