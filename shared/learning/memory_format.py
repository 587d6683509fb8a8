"""The order of activations in memory that is fastest on a CPU, for convolutional networks with many channels."""

import torch
from torch import Tensor, nn

_SMALL = 8  # up to this height or width, oneDNN's convolutions are slower with the channels last


def uses_onednn(x: Tensor) -> bool:
    """Return whether oneDNN computes convolutions of a tensor. What torch compiles or exports arranges itself."""
    return (
        x.device.type == "cpu"
        and bool(torch.backends.mkldnn.enabled)
        and torch.backends.mkldnn.is_available()
        and not torch.compiler.is_compiling()
    )


def arrange(x: Tensor) -> Tensor:
    """Return (B, C, H, W) with the channels last while the images are large: BatchNorm and pooling are faster then."""
    if not uses_onednn(x):
        return x
    is_small = min(x.shape[2:]) <= _SMALL
    return x.contiguous(memory_format=torch.contiguous_format if is_small else torch.channels_last)


def arrange_inputs(layer: nn.Module) -> None:
    """Let a layer arrange its input from now on."""
    layer.register_forward_pre_hook(_arrange_input)


def _arrange_input(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return arrange(inputs[0]), *inputs[1:]
