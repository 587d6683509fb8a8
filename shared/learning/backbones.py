"""Backbones: networks that map images (B, C, H, W) to feature vectors (B, features).

`shared.learning.model` adds the classifier. If the published network ends in a layer that is not a classifier for the
task (AlexNet's 1000 outputs), that layer becomes the model's `dense` layer, with the default width given here.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shared.contract.errors import BackboneError
from shared.contract.plan import BUILT_IN_BACKBONES, ImagePlan
from shared.learning.initialization import kaiming_layers
from shared.learning.memory_format import arrange, arrange_inputs
from shared.system.plugins import load_function


@dataclass(frozen=True)
class Backbone:
    """A network with the width of its output and the default width of the dense layer after it, if any."""

    net: nn.Module
    features: int
    dense_dim: int | None = None
    stem: "Stem | None" = None  # its first layer, if that is a Stem


class Stemmed(NamedTuple):
    """The first layer's output for an image; a backbone with a `Stem` accepts it in place of the image."""

    output: Tensor


class Stem(nn.Conv2d):
    """A first convolution whose output can be passed in.

    Convolution is linear, so the convolutions of both blended channels follow from those of the image and the offset.
    The image passes once instead of twice, and the offset's gradient needs the backward pass of one image, not of 2B.
    """

    arranges = False  # whether the images' memory is arranged for the layers that follow

    def forward(self, x: Tensor | Stemmed) -> Tensor:
        """Return the convolution of an image, or the output if it was passed in."""
        return x.output if isinstance(x, Stemmed) else super().forward(arrange(x) if self.arranges else x)

    def image_term(self, x: Tensor) -> Tensor:
        """Return the convolution of an image without bias: the part of `blend` that does not depend on the offset."""
        return self._conv_forward(arrange(x) if self.arranges else x, self.weight, None)  # type: ignore[no-any-return]

    def blend(self, image_term: Tensor, offset: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
        """Return the convolutions of both channels of Eq. 1."""
        shift = alpha * self.image_term(offset[None])
        # In place, because these tensors are large: LeNet's training spends more time on memory here than on sums.
        left, right = ((1 - alpha) * image_term).add_(shift), ((1 + alpha) * image_term).sub_(shift)
        if self.bias is None:
            return left, right
        bias = self.bias[:, None, None]
        return left.add_(bias), right.add_(bias)

    @classmethod
    def in_place_of(cls, layer: nn.Conv2d, channels: int) -> "Stem":
        """Return a stem like `layer`, with its weights, or with new ones if the number of channels differs."""
        stem = cls(
            channels,
            layer.out_channels,
            kernel_size=layer.kernel_size,  # type: ignore[arg-type]  # nn.Conv2d stores tuples of any length
            stride=layer.stride,  # type: ignore[arg-type]
            padding=layer.padding,  # type: ignore[arg-type]
            bias=layer.bias is not None,
        )
        if layer.in_channels == channels:
            stem.load_state_dict(layer.state_dict())
        return stem


def lenet(image: ImagePlan, activation: str, initialization: str) -> Backbone:
    """Build the authors' LeNet: two 5×5 convolutions with one pooling layer between them, 100 features.

    Their code has no activations; `activation="relu"` adds one after each layer. Their initial weights are "kaiming".
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
    net = nn.Sequential(*layers)
    if initialization == "kaiming":
        kaiming_layers(net)
    return Backbone(net, features=100, stem=stem)


def cnn(image: ImagePlan) -> Backbone:
    """Build pFedHN's network: two 5×5 convolutions, each followed by pooling, and two hidden layers; 84 features."""
    height, width = (((side - 4) // 2 - 4) // 2 for side in (image.height, image.width))
    stem = Stem(image.channels, 16, 5)
    layers: list[nn.Module] = [stem, nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 32, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()]
    layers += [nn.Linear(32 * height * width, 120), nn.ReLU(inplace=True), nn.Linear(120, 84), nn.ReLU(inplace=True)]
    return Backbone(nn.Sequential(*layers), features=84, stem=stem)


def _torchvision_models() -> ModuleType:
    """Import torchvision only when needed: it takes about as long as torch, and LeNet does not need it."""
    import torchvision.models

    return torchvision.models  # type: ignore[no-any-return]


class _AlexNet(nn.Module):
    """torchvision's AlexNet through its second hidden layer: 4096 features."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        models = _torchvision_models()
        net = models.alexnet(weights=None)
        self.features = net.features
        self.features[0] = Stem.in_place_of(net.features[0], channels)
        self.avgpool = net.avgpool
        self.classifier = net.classifier[:6]

    def stem(self) -> Stem:
        """Return the first layer."""
        return self.features[0]  # type: ignore[no-any-return]

    def forward(self, x: Tensor | Stemmed) -> Tensor:
        """(B, C, H, W) → (B, 4096)."""
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))  # type: ignore[no-any-return]


def _resnet(name: str, image: ImagePlan) -> Backbone:
    net = getattr(_torchvision_models(), name)(weights=None)
    features = net.fc.in_features
    net.fc = nn.Identity()
    net.conv1 = Stem.in_place_of(net.conv1, image.channels)
    net.conv1.arranges = True
    for layer in (net.layer1, net.layer2, net.layer3, net.layer4):
        arrange_inputs(layer)
    if image.channels != 3:
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision does
    return Backbone(net, features=features, stem=net.conv1)


def build_backbone(name: str, image: ImagePlan, activation: str = "none", initialization: str = "torch") -> Backbone:
    """Build the named backbone for images of this shape.

    `name` is built in, or "package.module:function", installed or in a folder of DISTRANS_PLUGINS. The function
    takes (channels, height, width) and returns a module that maps a batch of images to a batch of feature vectors.
    """
    if name not in BUILT_IN_BACKBONES:
        return _custom(name, image)
    minimum = BUILT_IN_BACKBONES[name]
    if min(image.height, image.width) < minimum:
        raise BackboneError(
            f"{name} needs images of at least {minimum}×{minimum}, not {image.height}×{image.width}.",
            next_step="Raise image.height and image.width in the plan, or choose another backbone.",
        )
    if name == "lenet":
        return lenet(image, activation, initialization)
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
    function = load_function(name, BackboneError, "on the coordinator and at every site")
    try:
        net = function(image.channels, image.height, image.width)
        was_training = net.training
        with torch.no_grad():
            features = net.eval()(torch.zeros(2, image.channels, image.height, image.width))
        net.train(was_training)
    except Exception as error:  # the user's own function may raise anything
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
