"""FedAvg: everyone trains the same single-channel model; the coordinator takes the mean."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from shared.initial_weights import fit_weights
from shared.methods.base import (
    SHARED,
    ClientHalf,
    ClientRecord,
    Facts,
    Predictor,
    RoundTask,
    ServerHalf,
    ServerState,
    Tensors,
    Update,
    Workplace,
)
from shared.methods.local import ModelStepper, Step, mean_loss, run_local_epochs
from shared.methods.serving import ModulePredictor, detached_state, load_shared
from shared.model import build_single
from shared.runtime import Runtime
from shared.wire import Spec


class FedAvgServer(ServerHalf):
    """θ ← mean of θ_i."""

    def build(self) -> nn.Module:
        """The network that is averaged, with its seeded random weights."""
        return build_single(self.plan)

    @override
    def initial_state(self, pretrained: Tensors | None = None) -> ServerState:
        model = self.build()
        if pretrained is not None:
            fit_weights(model, pretrained)
        return ServerState(shared=detached_state(model))

    @override
    def personal(
        self, state: ServerState, client: ClientRecord, roster: Sequence[ClientRecord], facts: Facts
    ) -> Tensors:
        return {}

    @override
    def update_spec(self, facts: Facts) -> Spec:
        with torch.device("meta"):
            return Spec.of(self.build().state_dict()).prefixed(SHARED)

    @override
    def finish(
        self,
        state: ServerState,
        mean: Tensors,
        uploads: Iterable[tuple[ClientRecord, Tensors]],
        roster: Sequence[ClientRecord],
        facts: Facts,
    ) -> ServerState:
        return ServerState(shared=mean)


class FedAvgClient(ClientHalf):
    """Plain local SGD from the global model; predicts with the global model."""

    @override
    def train(self, task: RoundTask, private: Tensors, workplace: Workplace) -> tuple[Update, Tensors]:
        runtime = workplace.runtime
        net = runtime.prepare(load_shared(build_single(self.plan), task.shared)).train()
        report = run_local_epochs(self.plan, task, net, workplace, self.step_on(net, task, runtime))
        return Update(detached_state(net), {}, report), private

    def step_on(self, net: nn.Module, task: RoundTask, runtime: Runtime) -> Step:
        """What is done with each batch."""
        del task
        forward, stepper = runtime.forward_of(net), ModelStepper(net, self.plan, runtime)

        def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            with runtime.autocast():
                logits = forward(x)
            loss = mean_loss(logits, y)
            stepper.step(loss)
            return logits.detach(), loss.detach()

        return step

    @override
    def predictor(self, task: RoundTask, private: Tensors, runtime: Runtime, *, use_offset: bool = True) -> Predictor:
        return ModulePredictor(load_shared(build_single(self.plan), task.shared), runtime)
