"""The site's own model, trained without the federation, for comparison."""

from shared.contract.method_options import FedAvgOptions
from shared.contract.plan import FederationPlan
from shared.learning.methods import client_half, server_half
from shared.learning.methods.base import Predictor, RoundTask, TrainingContext
from shared.learning.runtime import Runtime
from shared.tensors.names import Tensors


class LocalBaseline:
    """A single-channel model trained only on this site's data, for as many steps as the federation's."""

    def __init__(self, plan: FederationPlan, name: str) -> None:
        self._plan = plan.model_copy(update={"method": FedAvgOptions()})
        self._name = name

    def train(self, weights: Tensors, round_number: int, context: TrainingContext) -> Tensors:
        """Return the weights after one more round of local steps; without weights, start from the initial ones."""
        start = weights or server_half(self._plan).initial_state().shared
        update, _ = client_half(self._plan).train(RoundTask(self._name, round_number, start, {}), {}, context)
        return update.shared

    def predictor(self, weights: Tensors, runtime: Runtime) -> Predictor:
        """Return a predictor with these weights."""
        return client_half(self._plan).predictor(RoundTask(self._name, 0, weights, {}), {}, runtime)
