"""pFedMe: each client has a personal model θ_i, kept close to a local copy w_i of the global model w, which follows it.

On each batch θ ← θ − η_p (∇ℓ(θ) + λ (θ − w_i) + μ θ), K times; then w_i ← w_i − η λ (w_i − θ). Clients upload w_i; the
coordinator mixes w ← (1 − β) w + β × mean. θ_i stays at the agent, along with w_i, for comparison, and BatchNorm's
buffers, which are never averaged: the coordinator only sends their initial values.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from shared.contract.method_options import PFedMeOptions
from shared.contract.plan import FederationPlan
from shared.learning.methods.base import (
    ClientHalf,
    Predictor,
    RoundTask,
    TrainingContext,
    Update,
    options_of,
)
from shared.learning.methods.modules import ModulePredictor, detached_state, load_weights
from shared.learning.methods.training_loop import LocalTraining, ModelStepper, plain_step
from shared.learning.model import build_single
from shared.learning.runtime import Runtime
from shared.tensors.names import Tensors, add_prefix, strip_prefix

_PERSONAL_MODEL, _LOCAL_COPY = "personal.", "local_copy."


class PersonalSGD(torch.optim.Optimizer):
    """The optimizer of θ; `anchors` are the tensors of w_i, one per tensor of θ."""

    def __init__(self, parameters: Iterable[Tensor], anchors: Sequence[Tensor], options: PFedMeOptions) -> None:
        super().__init__(parameters, {})
        self._anchors, self._options = anchors, options

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure: the gradients are already there
        """θ ← θ − η_p (gradient + λ (θ − w_i) + μ θ)."""
        options = self._options
        for theta, anchor in zip(self.param_groups[0]["params"], self._anchors, strict=True):
            if theta.grad is not None:
                pull = theta.grad + options.attraction * (theta - anchor) + options.decay * theta
                theta -= options.personal_lr * pull

    @torch.no_grad()
    def update_anchors(self, lr: float) -> None:
        """w_i ← w_i − η λ (w_i − θ)."""
        for theta, anchor in zip(self.param_groups[0]["params"], self._anchors, strict=True):
            anchor -= lr * self._options.attraction * (anchor - theta)


class PFedMeClient(ClientHalf):
    """Trains θ_i and w_i from w and keeps both; predicts with the one the plan names."""

    is_personal = True
    can_adapt = False  # it is trained on the client's images already

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        self.options = options_of(plan, PFedMeOptions)

    @override
    def train(self, task: RoundTask, private: Tensors, context: TrainingContext) -> tuple[Update, Tensors]:
        runtime, options = context.runtime, self.options
        net = build_single(self.plan)
        names = [name for name, _ in net.named_parameters()]
        own_buffers = {
            name: value for name, value in strip_prefix(private, _PERSONAL_MODEL).items() if name not in names
        }
        net = runtime.prepare(load_weights(net, task.shared | own_buffers)).train()
        parameters = list(net.parameters())
        anchors = [parameter.detach().clone() for parameter in parameters]
        optimizer = PersonalSGD(parameters, anchors, options)
        personal_step = plain_step(net, ModelStepper(net, self.plan, runtime, optimizer), runtime)

        def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            for _ in range(options.inner_steps):
                result = personal_step(x, y)
            optimizer.update_anchors(self.plan.training.lr)
            return result

        report = LocalTraining(self.plan, task, context).run(net, step, steps=options.local_rounds)
        local_copy = {name: anchor.cpu().contiguous() for name, anchor in zip(names, anchors, strict=True)}
        copy = {name: value.clone() for name, value in local_copy.items()}
        kept = add_prefix(detached_state(net), _PERSONAL_MODEL) | add_prefix(copy, _LOCAL_COPY)
        return Update(local_copy, {}, report), kept

    @override
    def predictor(self, task: RoundTask, private: Tensors, runtime: Runtime, *, use_offset: bool = True) -> Predictor:
        return self._predictor(task, private, runtime, local_copy=self.options.predict == "local-copy")

    @override
    def alternative(self, task: RoundTask, private: Tensors, runtime: Runtime) -> Predictor:
        """Return the predictor of w_i if the plan predicts with θ_i, and vice versa."""
        return self._predictor(task, private, runtime, local_copy=self.options.predict != "local-copy")

    def _predictor(self, task: RoundTask, private: Tensors, runtime: Runtime, *, local_copy: bool) -> Predictor:
        own = strip_prefix(private, _PERSONAL_MODEL) | (strip_prefix(private, _LOCAL_COPY) if local_copy else {})
        return ModulePredictor(load_weights(build_single(self.plan), task.shared | own), runtime)
