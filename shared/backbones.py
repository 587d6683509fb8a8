"""The networks that turn an image into a feature vector, before any classifier.

A backbone is a module that maps (B, C, H, W) to (B, features). Its logits layer is added by `shared.model`. Where the
published network ends in a layer that is itself no classifier of the task (AlexNet's 1000 outputs), that layer is the
`dense` layer of the model, with the default width given here.
"""

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shared.plan import BUILT_IN_BACKBONES, ImagePlan
from shared.problems import BackboneError


@dataclass(frozen=True)
class Backbone:
    """A feature extractor with the width of its output and of the dense layer that belongs behind it, if any."""

    net: nn.Module
    features: int
    dense_dim: int | None = None
    stem: "Stem | None" = None  # its first layer, where that is a convolution of ours


class Stemmed(NamedTuple):
    """What the first layer has already made of an image; a backbone with a `Stem` takes it in the image's place."""

    output: Tensor


class Stem(nn.Conv2d):
    """A first convolution that can be given its own output.

    A convolution is linear: that of the two blended channels follows from that of the image and that of the offset.
    So the image passes once and not twice, and the offset's gradient needs one image's backward pass, not 2B.
    """

    def forward(self, x: Tensor | Stemmed) -> Tensor:
        """The convolution of an image, or what is given as its output."""
        return x.output if isinstance(x, Stemmed) else super().forward(x)

    def of_image(self, x: Tensor) -> Tensor:
        """The convolution of an image without the bias: the part of `blend` that does not depend on the offset."""
        return self._conv_forward(x, self.weight, None)  # type: ignore[no-any-return]

    def blend(self, of_image: Tensor, offset: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
        """The convolutions of both channels of Eq. 1, from that of the image."""
        shift = alpha * self._conv_forward(offset[None], self.weight, None)
        left, right = (1 - alpha) * of_image + shift, (1 + alpha) * of_image - shift
        if self.bias is None:
            return left, right
        bias = self.bias[:, None, None]
        return left + bias, right + bias

    @classmethod
    def in_place_of(cls, layer: nn.Conv2d, channels: int) -> "Stem":
        """A stem like `layer` and with its weights, or with new ones where the number of channels differs."""
        stem = cls(
            channels,
            layer.out_channels,
            kernel_size=layer.kernel_size,  # type: ignore[arg-type]  # nn.Conv2d keeps tuples of any length
            stride=layer.stride,  # type: ignore[arg-type]
            padding=layer.padding,  # type: ignore[arg-type]
            bias=layer.bias is not None,
        )
        if layer.in_channels == channels:
            stem.load_state_dict(layer.state_dict())
        return stem


def lenet(image: ImagePlan, activation: str) -> Backbone:
    """The authors' LeNet: two 5×5 convolutions with one pooling between them, 100 features.

    Their code has no activation at all; `activation="relu"` puts one behind each layer.
    """

    def after() -> list[nn.Module]:
        return [nn.ReLU(inplace=True)] if activation == "relu" else []

    height, width = ((side - 4) // 2 - 4 for side in (image.height, image.width))
    stem = Stem(image.channels, 6, 5)  # C×H×W → 6×(H−4)×(W−4)
    layers = [
        stem,
        *after(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        *after(),
        nn.Flatten(),
        nn.Linear(16 * height * width, 100),
        *after(),
    ]
    return Backbone(nn.Sequential(*layers), features=100, stem=stem)


def cnn(image: ImagePlan) -> Backbone:
    """pFedHN's network: two 5×5 convolutions, each with a pooling behind it, and two hidden layers; 84 features."""
    height, width = (((side - 4) // 2 - 4) // 2 for side in (image.height, image.width))
    stem = Stem(image.channels, 16, 5)
    layers: list[nn.Module] = [stem, nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 32, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()]
    layers += [nn.Linear(32 * height * width, 120), nn.ReLU(inplace=True), nn.Linear(120, 84), nn.ReLU(inplace=True)]
    return Backbone(nn.Sequential(*layers), features=84, stem=stem)


def _torchvision_models() -> ModuleType:
    """Imported when a network of it is built: it takes about as long to import as torch, and LeNet needs none of it."""
    import torchvision.models

    return torchvision.models  # type: ignore[no-any-return]


class _AlexNet(nn.Module):
    """torchvision's AlexNet up to and with its second hidden layer: 4096 features."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        models = _torchvision_models()
        net = models.alexnet(weights=None)
        self.features = net.features
        self.features[0] = Stem.in_place_of(net.features[0], channels)
        self.avgpool = net.avgpool
        self.classifier = net.classifier[:6]

    def stem(self) -> Stem:
        """Its first layer."""
        return self.features[0]  # type: ignore[no-any-return]

    def forward(self, x: Tensor | Stemmed) -> Tensor:
        """(B, C, H, W) → (B, 4096)."""
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))  # type: ignore[no-any-return]


def _resnet(name: str, image: ImagePlan) -> Backbone:
    net = getattr(_torchvision_models(), name)(weights=None)
    features = net.fc.in_features
    net.fc = nn.Identity()
    net.conv1 = Stem.in_place_of(net.conv1, image.channels)
    if image.channels != 3:
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision does
    return Backbone(net, features=features, stem=net.conv1)


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
    if name == "cnn":
        return cnn(image)
    if name == "alexnet":
        net = _AlexNet(image.channels)
        return Backbone(net, features=4096, dense_dim=1000, stem=net.stem())
    return _resnet(name, image)


def _custom(name: str, image: ImagePlan) -> Backbone:
    module_name, colon, function_name = name.partition(":")
    if not (colon and module_name and function_name):
        raise BackboneError(
            f"There is no backbone {name!r}.",
            next_step=f'Use one of {", ".join(BUILT_IN_BACKBONES)}, or "package.module:function" for your own.',
        )
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:  # a module of the user's may raise anything while it is imported
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
    if not isinstance(features, Tensor) or features.ndim != 2 or features.shape[0] != 2:
        found = f"tensor of shape {tuple(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
        raise BackboneError(
            f"The backbone {name!r} maps 2 images to a {found}.",
            next_step="It must return one flat feature vector per image.",
        )
    return Backbone(net, features=features.shape[1])
