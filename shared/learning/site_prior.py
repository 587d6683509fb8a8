"""A client's prior in a round: its own class frequencies relative to the federation's."""

from torch import Tensor

from shared.contract.class_totals import read_class_totals
from shared.contract.plan import FederationPlan
from shared.learning.heterogeneity import count_classes
from shared.learning.methods.base import LocalData, RoundTask
from shared.learning.priors import prior_shift


def site_prior_shift(plan: FederationPlan, task: RoundTask, data: LocalData) -> Tensor | None:
    """Return what adjusts the federation's logits to the client's class frequencies; None if totals are unknown."""
    totals = read_class_totals(task.facts, len(plan.classes))
    if totals is None:
        return None
    return prior_shift(count_classes(data.labels, len(plan.classes)).tolist(), totals)
