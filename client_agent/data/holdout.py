"""Held-out images, split into those that choose what to serve and those that test it."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from client_agent.status import HoldoutSizes
from shared.contract.seeds import derive_seed

MIN_SPLIT = 60  # with fewer images, neither half would show much


@dataclass(frozen=True)
class Holdout:
    """Positions of the held-out images that choose (`validation`) and that test; the same ones if they are few."""

    validation: Tensor
    test: Tensor
    is_split: bool

    @property
    def sizes(self) -> HoldoutSizes:
        """How many there are of each."""
        return HoldoutSizes(validation=len(self.validation), test=len(self.test), is_split=self.is_split)


def holdout_sizes(images: int) -> HoldoutSizes:
    """Return the sizes of both parts for this many images."""
    if images < MIN_SPLIT:
        return HoldoutSizes(validation=images, test=images, is_split=False)
    return HoldoutSizes(validation=images - images // 2, test=images // 2, is_split=True)


def split_holdout(labels: Tensor, seed: int) -> Holdout:
    """Split each class in half, at random but always in the same way; fewer than MIN_SPLIT images are not split."""
    if len(labels) < MIN_SPLIT:
        everything = torch.arange(len(labels))
        return Holdout(everything, everything, False)
    shuffled = np.random.default_rng(derive_seed(seed, "validation")).permutation(len(labels))
    # Every other image of each class; across classes, too, so that odd ones do not all end up in the same half.
    order = torch.from_numpy(shuffled[np.argsort(labels.numpy()[shuffled], kind="stable")])
    return Holdout(order[0::2].sort().values, order[1::2].sort().values, True)
