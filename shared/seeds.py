"""Every random choice of a federation follows from its plan's seed and the names of what it is for."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(*parts: str | int) -> int:
    """A 63-bit seed that depends on every part and on their order; the same on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextmanager
def seeded(*parts: str | int, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch for the block and give the caller its own random state back afterwards."""
    cuda = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        # Not torch.manual_seed: without a GPU it queues calls for one, each with a stack trace, and never drops them.
        torch.default_generator.manual_seed(derive_seed(*parts))
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(derive_seed(*parts))
        elif device is not None and device.type == "mps":
            torch.mps.manual_seed(derive_seed(*parts))
        yield
