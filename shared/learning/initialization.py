"""The initial values that the authors' code gives to the layers it adds: Kaiming-uniform weights and zero biases."""

from typing import TypeVar

from torch import nn

Layer = TypeVar("Layer", bound=nn.Linear | nn.Conv2d)


def kaiming(layer: Layer) -> Layer:
    """Give a layer Kaiming-uniform weights and a zero bias, and return it."""
    nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def kaiming_layers(net: nn.Module) -> None:
    """Apply `kaiming` to every convolution and linear layer of a network."""
    for layer in net.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            kaiming(layer)
