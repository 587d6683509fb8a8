"""Who holds how much of which class at which DH, by the paper's splitter; needs no images."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lab.datasets.registry import known
from lab.experiment import Experiment
from shared.heterogeneity import Shares, classes_per_client, distributional_heterogeneity, paper_shares


def shares_of(experiment: Experiment) -> Iterator[tuple[str, Shares]]:
    """A title and the shares for each data set, number of clients and DH, at the first seed."""
    for entry in experiment.data:
        classes = entry.classes or known(entry.name).classes
        for clients in entry.clients:
            for dh in entry.dh:
                each = classes_per_client(dh, classes, clients)
                yield (
                    f"{entry.title}, {clients} clients, DH {dh:.0%}",
                    paper_shares(classes, clients, each, experiment.seeds[0]),
                )


def distribution_table(experiment: Experiment) -> str:
    """The DH that each split has, and how many classes a client and how many clients a class."""
    lines = ["| split | DH of its counts | classes a client | clients a class |", "|---|---|---|---|"]
    for title, shares in shares_of(experiment):
        held = shares.values > 0
        dh = distributional_heterogeneity(held.astype(int))
        lines.append(f"| {title} | {dh:.0%} | {_span(held.sum(axis=1))} | {_span(held.sum(axis=0))} |")
    return "\n".join([*lines, ""])


def _span(counts: NDArray[np.int64]) -> str:
    low, high = counts.min(), counts.max()
    return f"{low}" if low == high else f"{low} … {high}"
