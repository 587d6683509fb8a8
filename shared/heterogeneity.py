"""How much the clients' data differ (DH), what the coordinator knows of a client (its class embedding), and splits.

Class counts are an integer array (clients, classes).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shared.problems import SplitError
from shared.seeds import derive_seed

Counts = NDArray[np.int64]
Indices = NDArray[np.int64]
_DH_TOLERANCE = 0.005


def distributional_heterogeneity(class_counts: ArrayLike) -> float:
    """DH of Eq. 3: 1 − Σ c_j / (N·C), where c_j counts the holders of class j if there are at least two, else 0."""
    counts = np.atleast_2d(np.asarray(class_counts))
    if counts.size == 0:
        raise SplitError("DH needs at least one client and one class.")
    holders = (counts > 0).sum(axis=0)
    # Rounded once, so that a DH of 20% equals 0.2 and a strict threshold is strict; 1 − 0.8 would fall short of it.
    return float((counts.size - holders[holders > 1].sum()) / counts.size)


def class_embeddings(class_counts: ArrayLike) -> NDArray[np.float64]:
    """e[i, c]: the share of all images of class c that client i has; 0 for a class that nobody has."""
    counts = np.atleast_2d(np.asarray(class_counts, dtype=np.float64))
    totals = counts.sum(axis=0)
    embeddings = np.zeros_like(counts)
    np.divide(counts, totals, out=embeddings, where=totals > 0)
    return embeddings


def count_classes(labels: ArrayLike, classes: int) -> Counts:
    """How many labels there are of each class."""
    return np.bincount(np.asarray(labels, dtype=np.int64), minlength=classes).astype(np.int64)


def classes_per_client(dh: float, classes: int, clients: int) -> int:
    """The u of the paper's splitter whose DH is `dh`; a SplitError lists what can be had instead."""
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
    """The values of DH that can be had, each with its number of classes per client."""
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
    """Which share of each class each client gets, as (clients, classes); apply it to training and test labels alike."""

    values: NDArray[np.float64]
    keep_all: bool  # False: fractions are cut and the remainder is dropped, as the paper's splitter does

    def split(
        self, labels: ArrayLike, seed: int, *, held_out: bool = False, names: Sequence[str] = ()
    ) -> list[Indices]:
        """For each client, the sorted indices of its images; no image goes to two clients.

        Where fractions are cut, a class too small to give each of its clients a training image is a SplitError, by its
        name if there are names. Of held-out images a client may get none; that nobody gets any of some is a SplitError.
        """
        label_array = np.asarray(labels, dtype=np.int64)
        generator = np.random.default_rng(derive_seed(seed, "split"))
        clients, classes = self.values.shape
        if label_array.size and not 0 <= label_array.min() <= label_array.max() < classes:
            raise SplitError(f"Labels must lie in 0 … {classes - 1}.")
        parts: list[list[Indices]] = [[] for _ in range(clients)]
        for label in range(classes):
            members = generator.permutation(np.flatnonzero(label_array == label))
            column = self.values[:, label]
            if self.keep_all:
                ends = np.round(np.cumsum(column) * len(members)).astype(int)
                sizes = np.diff(ends, prepend=0)
            else:
                # The tiny addition keeps a share of, say, 0.3 of 10 from being cut to 2 by its binary form.
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


def paper_shares(
    classes: int, clients: int, classes_each: int, seed: int, *, allow_uneven: bool = False, low: float = 0.4
) -> Shares:
    """The paper's splitter: each client holds `classes_each` classes, each class is shared in parts from U(low, 0.6).

    Every class has equally many holders; where that does not divide, a SplitError says what would, unless
    `allow_uneven` lets some classes have one holder more than others.
    """
    if not 1 <= classes_each <= classes:
        raise SplitError(f"A client can hold 1 … {classes} classes, not {classes_each}.")
    quota, left_over = divmod(classes_each * clients, classes)
    if left_over and not allow_uneven:
        raise SplitError(
            f"{clients} clients × {classes_each} classes each do not divide evenly over {classes} classes.",
            next_step=_what_divides(classes, clients),
        )
    generator = np.random.default_rng(derive_seed(seed, "classes"))
    remaining = np.full(classes, quota)
    remaining[generator.permutation(classes)[:left_over]] += 1
    holds = np.zeros((clients, classes), dtype=bool)
    for client in range(clients):
        for _ in range(classes_each):
            open_quota = np.where(holds[client], -1, remaining)
            choice = generator.choice(np.flatnonzero(open_quota == open_quota.max()))
            holds[client, choice] = True
            remaining[choice] -= 1
    draws = np.where(holds, generator.uniform(low, 0.6, size=holds.shape), 0.0)
    totals = draws.sum(axis=0)
    return Shares(np.divide(draws, totals, out=np.zeros_like(draws), where=totals > 0), keep_all=False)


def dirichlet_shares(classes: int, clients: int, concentration: float, seed: int) -> Shares:
    """Each class is shared by a draw from a symmetric Dirichlet distribution; a small concentration means different."""
    if concentration <= 0:
        raise SplitError("The Dirichlet concentration must be positive.", next_step="Usual values are 0.1 … 10.")
    generator = np.random.default_rng(derive_seed(seed, "dirichlet"))
    return Shares(generator.dirichlet(np.full(clients, concentration), size=classes).T, keep_all=True)
