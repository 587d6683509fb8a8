"""Distributional heterogeneity (DH) and class embeddings, both from class counts (clients, classes)."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shared.contract.errors import SplitError

Counts = NDArray[np.int64]


def distributional_heterogeneity(class_counts: ArrayLike) -> float:
    """Return DH (Eq. 3): 1 − Σ c_j / (N·C), where c_j is the number of holders of class j if at least two, else 0."""
    counts = np.atleast_2d(np.asarray(class_counts))
    if counts.size == 0:
        raise SplitError("DH needs at least one client and one class.")
    holders = (counts > 0).sum(axis=0)
    # Rounded once, so that a DH of 20 % equals 0.2 and is not below that threshold; 1 − 0.8 would be.
    return float((counts.size - holders[holders > 1].sum()) / counts.size)


def class_embeddings(class_counts: ArrayLike) -> NDArray[np.float64]:
    """Return e[i, c], client i's share of all images of class c; 0 for classes without images."""
    counts = np.atleast_2d(np.asarray(class_counts, dtype=np.float64))
    totals = counts.sum(axis=0)
    embeddings = np.zeros_like(counts)
    np.divide(counts, totals, out=embeddings, where=totals > 0)
    return embeddings


def count_classes(labels: ArrayLike, classes: int) -> Counts:
    """Return the number of labels of each class."""
    return np.bincount(np.asarray(labels, dtype=np.int64), minlength=classes).astype(np.int64)
