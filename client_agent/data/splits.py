"""A site's examples, split into training and held-out ones."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from shared.contract.seeds import derive_seed

_HELD_OUT_SHARE = 0.2
Item = Path | Tensor  # a file, or pixels (C, h, w) in [0, 1]


@dataclass(frozen=True)
class Example:
    """One image and the name of its class."""

    item: Item
    label: str


@dataclass(frozen=True)
class Split:
    """A site's examples; `test` is never trained on. `empty` names classes that have a folder but no images."""

    train: list[Example]
    test: list[Example]
    empty: tuple[str, ...] = ()

    def renamed(self, names: Mapping[str, str]) -> "Split":
        """Return the same examples with some classes renamed."""
        if not names:
            return self
        train, test = (
            [Example(one.item, names.get(one.label, one.label)) for one in part] for part in (self.train, self.test)
        )
        held = {example.label for example in train + test}
        empty = dict.fromkeys(names.get(name, name) for name in self.empty)
        return Split(train, test, tuple(name for name in empty if name not in held))


def stratify(examples: list[Example], seed: int, empty: tuple[str, ...] = ()) -> Split:
    """Hold out a fifth of each class, chosen by the seed; a class with a single image keeps it for training."""
    by_class: defaultdict[str, list[Example]] = defaultdict(list)
    for example in examples:
        by_class[example.label].append(example)
    train: list[Example] = []
    test: list[Example] = []
    for label, members in sorted(by_class.items()):
        order = np.random.default_rng(derive_seed(seed, "held-out", label)).permutation(len(members))
        held_out = max(1, round(_HELD_OUT_SHARE * len(members))) if len(members) > 1 else 0
        test += [members[index] for index in sorted(order[:held_out])]
        train += [members[index] for index in sorted(order[held_out:])]
    return Split(train, test, empty)
