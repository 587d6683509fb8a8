"""FedAvg: all clients train the same single-channel model, and the coordinator averages it."""

from torch import nn
from typing_extensions import override

from shared.learning.methods.base import ClientHalf, Predictor, RoundTask, TrainingContext, Update
from shared.learning.methods.modules import ModulePredictor, detached_state, load_weights
from shared.learning.methods.training_loop import LocalTraining, ModelStepper, Step, plain_step
from shared.learning.model import build_single
from shared.learning.runtime import Runtime
from shared.tensors.names import Tensors


class FedAvgClient(ClientHalf):
    """Trains the global model with plain SGD; predicts with the global model."""

    @override
    def train(self, task: RoundTask, private: Tensors, context: TrainingContext) -> tuple[Update, Tensors]:
        runtime = context.runtime
        net = runtime.prepare(load_weights(build_single(self.plan), task.shared)).train()
        report = LocalTraining(self.plan, task, context).run(net, self.build_step(net, task, runtime))
        return Update(detached_state(net), {}, report), private

    def build_step(self, net: nn.Module, task: RoundTask, runtime: Runtime) -> Step:
        """Return the step to take on each batch."""
        del task
        return plain_step(net, ModelStepper(net, self.plan, runtime), runtime)

    @override
    def predictor(self, task: RoundTask, private: Tensors, runtime: Runtime, *, use_offset: bool = True) -> Predictor:
        return ModulePredictor(load_weights(build_single(self.plan), task.shared), runtime)
