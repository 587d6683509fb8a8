"""Where and how a program computes: device, precision, memory format, compilation. Each site chooses for itself."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from shared.contract.errors import DistransError

Precision = Literal["fp32", "bf16", "fp16"]
Net = TypeVar("Net", bound=nn.Module)


def select_device(wanted: str = "auto") -> torch.device:
    """Return the device: `auto` means CUDA, else Apple's MPS, else the CPU. Raise if a named device is unavailable."""
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise DistransError(
            f"Device {wanted!r} is not available: {str(error).splitlines()[0]}",
            next_step="Use --device auto or --device cpu.",
        ) from error
    return device


@dataclass(frozen=True)
class Runtime:
    """The device and precision of one program; everything but the device is off by default."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: Precision = "fp32"
    channels_last: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        if self.precision == "fp16" and self.device.type != "cuda":
            raise DistransError(
                f"fp16 needs CUDA, but this site computes on {self.device.type}.", next_step="Use bf16 or fp32."
            )

    def prepare(self, net: Net) -> Net:
        """Move a network to the device, in the chosen memory format."""
        if self.channels_last:
            return net.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
        return net.to(self.device)

    def forward_of(self, net: nn.Module) -> Callable[..., Tensor]:
        """Return the network's forward pass, compiled if chosen; weights stay in `net`."""
        return cast(Callable[..., Tensor], torch.compile(net) if self.compile else net)

    def move(self, images: Tensor) -> Tensor:
        """Move images to the device, without waiting if memory is pinned."""
        if self.channels_last:
            return images.to(self.device, non_blocking=True, memory_format=torch.channels_last)
        return images.to(self.device, non_blocking=True)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the mixed-precision context for forward passes."""
        if self.precision == "fp32":
            return nullcontext()
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float16
        return torch.autocast(self.device.type, dtype=dtype)

    def scaler(self) -> torch.amp.GradScaler:
        """Return the loss scaler that keeps fp16 gradients from underflowing; a no-op in other precisions."""
        return torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
