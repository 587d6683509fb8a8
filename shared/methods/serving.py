"""From named tensors to a module and back, and the module as a predictor."""

import torch
from torch import Tensor, nn

from shared.methods.base import Tensors
from shared.runtime import Net, Runtime


def load_shared(net: Net, shared: Tensors) -> Net:
    """Put a whole set of weights into a newly built network."""
    net.load_state_dict(shared, strict=True)
    return net


def detached_state(net: nn.Module) -> Tensors:
    """A network's state on the CPU, independent of the network, in plain memory order."""
    return {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in net.state_dict().items()
    }


def parameters_of(net: nn.Module) -> Tensors:
    """A network's trained tensors on the CPU, independent of the network: its state without the buffers."""
    names = {name for name, _ in net.named_parameters()}
    return {name: value for name, value in detached_state(net).items() if name in names}


def buffers_of(net: nn.Module) -> Tensors:
    """The rest of its state: BatchNorm's running statistics and counters."""
    names = {name for name, _ in net.named_parameters()}
    return {name: value for name, value in detached_state(net).items() if name not in names}


def prefixed(tensors: Tensors, prefix: str) -> Tensors:
    """The same tensors with the prefix before each name."""
    return {prefix + name: value for name, value in tensors.items()}


def cut(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


class ModulePredictor:
    """A frozen network in eval mode, with the extra inputs that it takes beside the images."""

    def __init__(self, net: nn.Module, runtime: Runtime, *extras: Tensor) -> None:
        self.net = runtime.prepare(net).eval().requires_grad_(False)
        self.extras = [extra.to(runtime.device) for extra in extras]
        self._runtime = runtime

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """Normalised images → logits in float32."""
        with self._runtime.autocast():
            return self.net(self._runtime.move(images), *self.extras).float()  # type: ignore[no-any-return]
