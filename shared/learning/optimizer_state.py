"""An optimizer's state as named tensors, for storage between rounds."""

import torch
from torch import Tensor, nn

from shared.tensors.names import Tensors


def optimizer_tensors(optimizer: torch.optim.Optimizer, net: nn.Module) -> Tensors:
    """Return copies of the optimizer's tensors (momentum, …), named `KEY:PARAMETER`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in net.named_parameters()}
    return {
        f"{key}:{names[parameter]}": value.detach().clone()
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, net: nn.Module, tensors: Tensors) -> None:
    """Replace the optimizer's state with tensors returned by `optimizer_tensors`."""
    parameters = dict(net.named_parameters())
    optimizer.state.clear()
    for full_name, value in tensors.items():
        key, _, name = full_name.partition(":")
        optimizer.state[parameters[name]][key] = value.clone()
