"""Choosing the participants of a round."""

import math
import random
from collections.abc import Collection

from shared.contract.seeds import derive_seed


def choose_participants(names: Collection[str], fraction: float, seed: int, round_number: int) -> list[str]:
    """Choose a fraction of the clients, at least one. The same seed, round and clients give the same choice."""
    ordered = sorted(names)
    wanted = max(1, math.ceil(len(ordered) * fraction - 1e-9))
    chooser = random.Random(derive_seed(seed, "participants", round_number))  # noqa: S311 - reproducible, not secret
    return sorted(chooser.sample(ordered, wanted))
