"""A model's score on a site's held-out images."""

from client_agent.data.dataset import SiteData, unreadable_limit
from shared.contract.measurements import Evaluation
from shared.contract.plan import FederationPlan
from shared.learning.evaluation import evaluate
from shared.learning.methods.base import Predictor

_BATCH = 128


def measure(predictor: Predictor, data: SiteData, plan: FederationPlan) -> Evaluation | None:
    """Return the score on the readable held-out images; None if there are none, or too many cannot be read."""
    if not data.test.samples:
        return None
    own = [index for index, name in enumerate(plan.classes) if data.report.class_counts[name]]
    score = evaluate(predictor, data.test.batches(_BATCH, seed=0), own)
    return score if data.test.samples - score.samples <= unreadable_limit(data.test.samples) else None
