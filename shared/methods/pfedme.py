"""pFedMe: every client has a personal model θ_i, held near a local copy w_i of the global model w, which follows θ_i.

On each batch θ ← θ − η_p (∇ℓ(θ) + λ (θ − w_i) + μ θ), K times; then w_i ← w_i − η λ (w_i − θ). The clients upload w_i;
the coordinator mixes w ← (1 − β) w + β × mean. θ_i stays at the agent, and with it w_i, for comparison, and the
buffers of BatchNorm, which are never averaged: what the coordinator sends of them is their start.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from shared.method_options import PFedMeOptions
from shared.methods.base import (
    SHARED,
    ClientHalf,
    ClientRecord,
    Facts,
    Predictor,
    RoundTask,
    ServerState,
    Tensors,
    Update,
    Workplace,
    options_of,
)
from shared.methods.fedavg import FedAvgServer
from shared.methods.local import ModelStepper, mean_loss, run_local_epochs
from shared.methods.serving import ModulePredictor, cut, detached_state, load_shared, prefixed
from shared.model import build_single
from shared.plan import FederationPlan
from shared.runtime import Runtime
from shared.wire import Spec

_PERSONAL_MODEL, _LOCAL_COPY = "personal.", "local_copy."


class PFedMeServer(FedAvgServer):
    """w ← (1 − β) w + β × mean of w_i, over parameters only."""

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        self.options = options_of(plan, PFedMeOptions)

    @override
    def update_spec(self, facts: Facts) -> Spec:
        with torch.device("meta"):
            return Spec.of(dict(self.build().named_parameters())).prefixed(SHARED)

    @override
    def finish(
        self,
        state: ServerState,
        mean: Tensors,
        uploads: Iterable[tuple[ClientRecord, Tensors]],
        roster: Sequence[ClientRecord],
        facts: Facts,
    ) -> ServerState:
        beta = self.options.server_mix
        if beta != 1:
            mean = {name: (1 - beta) * state.shared[name] + beta * value for name, value in mean.items()}
        return ServerState(shared=state.shared | mean)


class PersonalSGD(torch.optim.Optimizer):
    """One step of θ; `anchors` are the tensors of w_i, one for each of θ's."""

    def __init__(self, parameters: Iterable[Tensor], anchors: Sequence[Tensor], options: PFedMeOptions) -> None:
        super().__init__(parameters, {})
        self._anchors, self._options = anchors, options

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure: the gradients are there
        """θ ← θ − η_p (gradient + λ (θ − w_i) + μ θ)."""
        options = self._options
        for theta, anchor in zip(self.param_groups[0]["params"], self._anchors, strict=True):
            if theta.grad is not None:
                pull = theta.grad + options.attraction * (theta - anchor) + options.decay * theta
                theta -= options.personal_lr * pull

    @torch.no_grad()
    def follow(self, lr: float) -> None:
        """w_i ← w_i − η λ (w_i − θ)."""
        for theta, anchor in zip(self.param_groups[0]["params"], self._anchors, strict=True):
            anchor -= lr * self._options.attraction * (anchor - theta)


class PFedMeClient(ClientHalf):
    """Trains θ_i and w_i from w and keeps both; predicts with the one that the plan names."""

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        self.options = options_of(plan, PFedMeOptions)

    @override
    def train(self, task: RoundTask, private: Tensors, workplace: Workplace) -> tuple[Update, Tensors]:
        runtime, options = workplace.runtime, self.options
        net = build_single(self.plan)
        names = [name for name, _ in net.named_parameters()]
        own_buffers = {name: value for name, value in cut(private, _PERSONAL_MODEL).items() if name not in names}
        net = runtime.prepare(load_shared(net, task.shared | own_buffers)).train()
        parameters = list(net.parameters())
        anchors = [parameter.detach().clone() for parameter in parameters]
        optimizer = PersonalSGD(parameters, anchors, options)
        forward, stepper = runtime.forward_of(net), ModelStepper(net, self.plan, runtime, optimizer)

        def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            for _ in range(options.inner_steps):
                with runtime.autocast():
                    logits = forward(x)
                loss = mean_loss(logits, y)
                stepper.step(loss)
            optimizer.follow(self.plan.training.lr)
            return logits.detach(), loss.detach()

        report = run_local_epochs(self.plan, task, net, workplace, step, steps=options.local_rounds)
        local_copy = {name: anchor.cpu().contiguous() for name, anchor in zip(names, anchors, strict=True)}
        copy = {name: value.clone() for name, value in local_copy.items()}
        kept = prefixed(detached_state(net), _PERSONAL_MODEL) | prefixed(copy, _LOCAL_COPY)
        return Update(local_copy, {}, report), kept

    @override
    def predictor(self, task: RoundTask, private: Tensors, runtime: Runtime, *, use_offset: bool = True) -> Predictor:
        return self._predictor(task, private, runtime, local_copy=self.options.predict == "local-copy")

    @override
    def alternative(self, task: RoundTask, private: Tensors, runtime: Runtime) -> Predictor:
        """That of w_i where the plan predicts with θ_i, and the other way round."""
        return self._predictor(task, private, runtime, local_copy=self.options.predict != "local-copy")

    def _predictor(self, task: RoundTask, private: Tensors, runtime: Runtime, *, local_copy: bool) -> Predictor:
        own = cut(private, _PERSONAL_MODEL) | (cut(private, _LOCAL_COPY) if local_copy else {})
        return ModulePredictor(load_shared(build_single(self.plan), task.shared | own), runtime)
