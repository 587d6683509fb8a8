"""Every random choice of a federation follows from its plan's seed and the names of what it is for.

torch is loaded by those who draw from it; seeds are also for programs without it.
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Torch draws from one generator a device, whichever thread asks: who has set its state holds this until it is set back.
_DEFAULT_GENERATORS = threading.RLock()


def derive_seed(*parts: str | int) -> int:
    """A 63-bit seed that depends on every part and on their order; the same on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class RandomStream:
    """Torch's random numbers from a seed, drawn in one block or several; what others draw in between changes none."""

    def __init__(self, *parts: str | int, device: "torch.device | None" = None) -> None:
        self._seed = derive_seed(*parts)
        self._generators = _default_generators(device)
        self._reached: list[Tensor] | None = None

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Torch draws from this stream in the block; the caller has its own random state back afterwards."""
        with _DEFAULT_GENERATORS:
            before = [generator.get_state() for generator in self._generators]
            try:
                # Not torch.manual_seed: without a GPU it queues calls for one, each with a stack trace, for ever.
                for number, generator in enumerate(self._generators):
                    if self._reached is None:
                        generator.manual_seed(self._seed)
                    else:
                        generator.set_state(self._reached[number])
                yield
                self._reached = [generator.get_state() for generator in self._generators]
            finally:
                for generator, state in zip(self._generators, before, strict=True):
                    generator.set_state(state)


@contextmanager
def seeded(*parts: str | int) -> Iterator[None]:
    """Seed torch for the block, which should be short: other threads that want to draw wait for its end."""
    with RandomStream(*parts).drawn():
        yield


def _default_generators(device: "torch.device | None") -> "list[torch.Generator]":
    import torch

    generators = [torch.default_generator]
    if device is not None and device.type == "cuda":
        torch.cuda.init()
        number = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[number])
    elif device is not None and device.type == "mps":
        generators.append(torch.mps._get_default_mps_generator())
    return generators
