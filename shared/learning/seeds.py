"""torch's random numbers from derived seeds; see `shared.contract.seeds`."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shared.contract.seeds import derive_seed

# torch has one default generator per device for all threads: a thread that changes its state holds this lock
# until it has restored it.
_GENERATOR_LOCK = threading.RLock()


class RandomStream:
    """torch's random numbers from one seed, drawn in one or more blocks and unaffected by draws in between."""

    def __init__(self, *parts: str | int, device: torch.device | None = None) -> None:
        self._seed = derive_seed(*parts)
        self._generators = _default_generators(device)
        self._states: list[Tensor] | None = None  # where the last block stopped

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Let torch draw from this stream inside the block; restore the caller's random state afterward."""
        with _GENERATOR_LOCK:
            before = [generator.get_state() for generator in self._generators]
            try:
                # Not torch.manual_seed: without a GPU it queues a call for one, with a stack trace, every time.
                for number, generator in enumerate(self._generators):
                    if self._states is None:
                        generator.manual_seed(self._seed)
                    else:
                        generator.set_state(self._states[number])
                yield
                self._states = [generator.get_state() for generator in self._generators]
            finally:
                for generator, state in zip(self._generators, before, strict=True):
                    generator.set_state(state)


@contextmanager
def seeded(*parts: str | int) -> Iterator[None]:
    """Seed torch inside the block. Keep it short: other seeded threads wait until it ends."""
    with RandomStream(*parts).drawn():
        yield


def _default_generators(device: torch.device | None) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device is not None and device.type == "cuda":
        torch.cuda.init()
        number = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[number])
    elif device is not None and device.type == "mps":
        generators.append(torch.mps._get_default_mps_generator())
    return generators
