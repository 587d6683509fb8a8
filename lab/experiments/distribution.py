"""How the paper's splitter distributes the classes over clients at each DH; needs no images."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lab.datasets.registry import dataset_info
from lab.datasets.splitters import Shares, classes_per_client, paper_shares
from lab.experiments.experiment import Experiment
from shared.learning.heterogeneity import distributional_heterogeneity


def shares_of(experiment: Experiment) -> Iterator[tuple[str, Shares]]:
    """Yield a title and the shares for each data set, number of clients and DH, with the first seed."""
    for entry in experiment.data:
        classes = entry.classes or dataset_info(entry.name).classes
        for clients in entry.clients:
            for dh in entry.dh:
                each = classes_per_client(dh, classes, clients)
                yield (
                    f"{entry.title}, {clients} clients, DH {dh:.0%}",
                    paper_shares(classes, clients, each, experiment.seeds[0]),
                )


def distribution_table(experiment: Experiment) -> str:
    """Return a table of each split's DH, classes per client and clients per class."""
    lines = ["| split | measured DH | classes per client | clients per class |", "|---|---|---|---|"]
    for title, shares in shares_of(experiment):
        held = shares.values > 0
        dh = distributional_heterogeneity(held.astype(int))
        lines.append(f"| {title} | {dh:.0%} | {_span(held.sum(axis=1))} | {_span(held.sum(axis=0))} |")
    return "\n".join([*lines, ""])


def _span(counts: NDArray[np.int64]) -> str:
    low, high = counts.min(), counts.max()
    return f"{low}" if low == high else f"{low} … {high}"
