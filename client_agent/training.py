"""A site's measurements and its model of its own, beside the federation's."""

from client_agent.data import SiteData, most_unreadable
from shared.evaluation import Evaluation
from shared.measuring import evaluate
from shared.method_options import FedAvgOptions
from shared.methods import client_half, server_half
from shared.methods.base import Predictor, RoundTask, Tensors, Workplace
from shared.plan import FederationPlan
from shared.runtime import Runtime

_BATCH = 128


def measure(predictor: Predictor, data: SiteData, plan: FederationPlan) -> Evaluation | None:
    """Score on the held-out images that can be read; None when too many of them cannot, or there are none."""
    if not data.test.samples:
        return None
    own = [place for place, name in enumerate(plan.classes) if data.report.class_counts[name]]
    score = evaluate(predictor, data.test.batches(_BATCH, seed=0), own)
    return score if data.test.samples - score.samples <= most_unreadable(data.test.samples) else None


class LocalBaseline:
    """A single-channel model trained on this site's data alone, for as many steps as the federation's."""

    def __init__(self, plan: FederationPlan, name: str) -> None:
        self._plan = plan.model_copy(update={"method": FedAvgOptions()})
        self._name = name

    def train(self, weights: Tensors, round_number: int, place: Workplace) -> Tensors:
        """One more round of local steps."""
        start = weights or server_half(self._plan).initial_state().shared
        update, _ = client_half(self._plan).train(RoundTask(self._name, round_number, start, {}), {}, place)
        return update.shared

    def predictor(self, weights: Tensors, runtime: Runtime) -> Predictor:
        """To be measured."""
        return client_half(self._plan).predictor(RoundTask(self._name, 0, weights, {}), {}, runtime)
