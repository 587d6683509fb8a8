"""Conversions between modules and named tensors, and a module as a predictor."""

import torch
from torch import Tensor, nn

from shared.learning.runtime import Net, Runtime
from shared.tensors.names import Tensors


def load_weights(net: Net, weights: Tensors) -> Net:
    """Load a complete set of weights into a network and return it."""
    net.load_state_dict(weights, strict=True)
    return net


def detached_state(net: nn.Module) -> Tensors:
    """Return a copy of a network's state on the CPU, in contiguous memory."""
    return {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in net.state_dict().items()
    }


def parameters_of(net: nn.Module) -> Tensors:
    """Return the parameters in `detached_state`."""
    names = {name for name, _ in net.named_parameters()}
    return {name: value for name, value in detached_state(net).items() if name in names}


def buffers_of(net: nn.Module) -> Tensors:
    """Return the rest of `detached_state`: BatchNorm's running statistics and counters."""
    names = {name for name, _ in net.named_parameters()}
    return {name: value for name, value in detached_state(net).items() if name not in names}


class ModulePredictor:
    """A frozen network in eval mode, with its inputs besides the images."""

    def __init__(self, net: nn.Module, runtime: Runtime, *extras: Tensor) -> None:
        self.net = runtime.prepare(net).eval().requires_grad_(False)
        self.extras = [extra.to(runtime.device) for extra in extras]
        self._runtime = runtime

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """Normalized images → logits in float32."""
        with self._runtime.autocast():
            return self.net(self._runtime.move(images), *self.extras).float()  # type: ignore[no-any-return]
