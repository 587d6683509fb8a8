"""The paper's splitter: which client gets which share of each class."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lab.datasets.image_set import Indices
from shared.contract.errors import SplitError
from shared.contract.seeds import derive_seed

_DH_TOLERANCE = 0.005


def classes_per_client(dh: float, classes: int, clients: int) -> int:
    """Return the paper's u, the classes per client that give this DH; a SplitError lists the possible values."""
    reachable = _reachable(classes, clients)
    nearest = min(reachable, key=lambda value: abs(value - dh))
    if abs(nearest - dh) <= _DH_TOLERANCE:
        return reachable[nearest]
    options = ", ".join(f"{value:.0%}" for value in sorted(reachable))
    others = [n for n in range(1, 101) if any(abs(value - dh) <= _DH_TOLERANCE for value in _reachable(classes, n))]
    closest = " or ".join(str(n) for n in sorted(sorted(others, key=lambda n: abs(n - clients))[:2]))
    raise SplitError(
        f"{clients} clients with {classes} classes cannot have DH {dh:.0%}.",
        next_step=f"They can have {options}" + (f"; {closest} clients can have {dh:.0%}." if closest else "."),
    )


def _reachable(classes: int, clients: int) -> dict[float, int]:
    """Return the possible values of DH, each with its number of classes per client."""
    values: dict[float, int] = {}
    for u in range(1, classes + 1):
        if u * clients % classes == 0:
            holders = u * clients // classes
            values.setdefault(round(1 - u / classes if holders > 1 else 1.0, 9), u)
    return values


def _what_divides(classes: int, clients: int) -> str:
    per_client = [u for u in range(1, classes + 1) if u * clients % classes == 0]
    return f"With {clients} clients, these numbers of classes per client divide evenly: {per_client}."


@dataclass(frozen=True)
class Shares:
    """The share of each class that each client gets, (clients, classes); for training and test labels alike."""

    values: NDArray[np.float64]

    @property
    def sites(self) -> list[str]:
        """The clients' names: site-001, site-002, …"""
        clients = len(self.values)
        width = max(3, len(str(clients)))
        return [f"site-{number:0{width}}" for number in range(1, clients + 1)]

    def split(
        self, labels: ArrayLike, seed: int, *, held_out: bool = False, names: Sequence[str] = ()
    ) -> list[Indices]:
        """Return the sorted indices of each client's images. No image goes to two clients; leftover images go to none.

        Raises a SplitError if a class is too small to give each of its clients a training image (the message uses
        `names`, if given), or if no client gets any held-out image. Some clients may get no held-out images.
        """
        label_array = np.asarray(labels, dtype=np.int64)
        generator = np.random.default_rng(derive_seed(seed, "split"))
        clients, classes = self.values.shape
        if label_array.size and not 0 <= label_array.min() <= label_array.max() < classes:
            raise SplitError(f"Labels must be in 0 … {classes - 1}.")
        parts: list[list[Indices]] = [[] for _ in range(clients)]
        for label in range(classes):
            members = generator.permutation(np.flatnonzero(label_array == label))
            column = self.values[:, label]
            # Without the tiny addition, a share of 0.3 of 10 could be cut to 2 by its binary representation.
            sizes = np.floor(column * len(members) + 1e-9).astype(int)
            if not held_out and len(members) and (sizes[column > 0] == 0).any():
                raise SplitError(
                    f"Class {names[label] if names else label} has {len(members)} training images, too few for its "
                    f"{int((column > 0).sum())} clients.",
                    next_step="Use fewer clients or fewer classes per client.",
                )
            start = 0
            for client, size in enumerate(sizes):
                parts[client].append(members[start : start + size])
                start += size
        if held_out and label_array.size and not any(len(piece) for part in parts for piece in part):
            raise SplitError(
                f"None of the {clients} clients gets any held-out images; all classes together have "
                f"{label_array.size}.",
                next_step="Use fewer clients or hold out more images.",
            )
        return [np.sort(np.concatenate(part)) for part in parts]


def paper_shares(classes: int, clients: int, classes_each: int, seed: int) -> Shares:
    """Give each client `classes_each` classes, and its holders shares of each class in proportion to U(0.4, 0.6).

    Every class has equally many holders; if that does not divide evenly, a SplitError says what would.
    """
    if not 1 <= classes_each <= classes:
        raise SplitError(f"A client can hold 1 … {classes} classes, not {classes_each}.")
    quota, left_over = divmod(classes_each * clients, classes)
    if left_over:
        raise SplitError(
            f"{clients} clients × {classes_each} classes each do not divide evenly over {classes} classes.",
            next_step=_what_divides(classes, clients),
        )
    generator = np.random.default_rng(derive_seed(seed, "classes"))
    generator.permutation(classes)  # keeps the draws of published results
    remaining = np.full(classes, quota)
    holds = np.zeros((clients, classes), dtype=bool)
    for client in range(clients):
        for _ in range(classes_each):
            open_quota = np.where(holds[client], -1, remaining)
            choice = generator.choice(np.flatnonzero(open_quota == open_quota.max()))
            holds[client, choice] = True
            remaining[choice] -= 1
    draws = np.where(holds, generator.uniform(0.4, 0.6, size=holds.shape), 0.0)
    return Shares(draws / draws.sum(axis=0))
