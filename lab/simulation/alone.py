"""What every client achieves by itself: the same network and the same number of steps, without averaging."""

from collections.abc import Sequence

from typing_extensions import override

from lab.simulation.simulation import RoundOutcome, SimulatedClient, Simulation
from shared.contract.method_options import FedAvgOptions
from shared.contract.plan import FederationPlan
from shared.learning.methods.base import RoundTask
from shared.learning.runtime import Runtime
from shared.tensors.names import Tensors


class AloneSimulation(Simulation):
    """Clients that train a single-channel model in the rounds that would choose them, and never share it.

    Weights and batches are those of `client_agent.serving.baseline.LocalBaseline`, to the bit. A client's private
    tensors are its weights, so that checkpoints and evaluation work as for a federation.
    """

    def __init__(
        self,
        plan: FederationPlan,
        clients: Sequence[SimulatedClient],
        runtime: Runtime | None = None,
        pretrained: Tensors | None = None,
    ) -> None:
        training = plan.training.model_copy(update={"update_compression": "none"})
        plan = plan.model_copy(update={"method": FedAvgOptions(), "training": training})
        super().__init__(plan, clients, runtime, pretrained)

    @override
    def task(self, client: SimulatedClient) -> RoundTask:
        """Return the client's own weights as if they were the federation's."""
        return RoundTask(client.record.id, self.round + 1, client.private or self.state.shared, {})

    @override
    def run_round(self) -> RoundOutcome:
        """Train at every client that the coordinator would choose."""
        reports = {}
        for client in self.participants():
            update = self._train(client)
            client.private = update.shared
            reports[client.record.id] = update.report
        self.round += 1
        return RoundOutcome(self.round, {}, reports)
