"""AdvProp on FedAvg: clients train on each batch twice, clean and adversarial.

Adversarial images use separate BatchNorm layers: each BatchNorm layer has an `auxiliary` twin, whose tensors are
averaged with the rest or stay at the client. Prediction uses only the main layers. Without BatchNorm, this is plain
training on equal parts of clean and adversarial images.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from typing_extensions import override

from shared.contract.method_options import AdvPropOptions
from shared.contract.plan import FederationPlan, ImagePlan
from shared.learning.batchnorm import add_auxiliary, using
from shared.learning.methods.base import Predictor, RoundTask, TrainingContext, Update, options_of
from shared.learning.methods.fedavg import FedAvgClient
from shared.learning.methods.modules import ModulePredictor, detached_state, load_weights
from shared.learning.methods.training_loop import LocalTraining, ModelStepper, Step, mean_loss
from shared.learning.model import build_single
from shared.learning.runtime import Runtime
from shared.tensors.names import Tensors

_AUXILIARY = ".auxiliary."


def without_auxiliary(tensors: Tensors) -> Tensors:
    """Return the plain network's tensors."""
    return {name: value for name, value in tensors.items() if _AUXILIARY not in name}


def only_auxiliary(tensors: Tensors) -> Tensors:
    """Return the auxiliary layers' tensors."""
    return {name: value for name, value in tensors.items() if _AUXILIARY in name}


class Attack:
    """Creates adversarial images within ε of the clean ones and within the pixel range, per normalized channel."""

    def __init__(self, image: ImagePlan, options: AdvPropOptions, device: torch.device | None = None) -> None:
        mean, std = (torch.tensor(values, device=device).reshape(-1, 1, 1) for values in (image.mean, image.std))
        self.epsilon = options.epsilon / 255 / std
        self.step = max(options.step, options.epsilon / max(options.iterations, 1)) / 255 / std
        self.low, self.high = (0 - mean) / std, (1 - mean) / std
        self._options = options

    def __call__(self, x: Tensor, loss_at: Callable[[Tensor], Tensor]) -> Tensor:
        """Return images that raise the loss, or lower it if targeted at another class; leave no gradients behind."""
        found = x
        if self._options.random_start:
            found = self._confine(x + self.epsilon * (2 * torch.rand_like(x) - 1), x)
        direction = -1 if self._options.targeted else 1
        for _ in range(self._options.iterations):
            found = found.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(loss_at(found), [found])
            found = self._confine(found.detach() + direction * self.step * gradient.sign(), x)
        return found.detach()

    def _confine(self, found: Tensor, x: Tensor) -> Tensor:
        near = torch.minimum(torch.maximum(found, x - self.epsilon), x + self.epsilon)
        return torch.minimum(torch.maximum(near, self.low), self.high)


class AdvPropClient(FedAvgClient):
    """Local SGD on clean and adversarial images; predicts with the main BatchNorm layers."""

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        self.options = options_of(plan, AdvPropOptions)

    @override
    def train(self, task: RoundTask, private: Tensors, context: TrainingContext) -> tuple[Update, Tensors]:
        runtime = context.runtime
        # Loaded before the auxiliary layers are added, so that those nobody sends start as copies of the main ones.
        net = add_auxiliary(load_weights(build_single(self.plan), without_auxiliary(task.shared)))
        net.load_state_dict(only_auxiliary(task.shared) | private, strict=False)
        net = runtime.prepare(net).train()
        report = LocalTraining(self.plan, task, context).run(net, self.build_step(net, task, runtime))
        trained = detached_state(net)
        if self.options.auxiliary_batchnorm == "averaged":
            return Update(trained, {}, report), {}
        return Update(without_auxiliary(trained), {}, report), only_auxiliary(trained)

    @override
    def build_step(self, net: nn.Module, task: RoundTask, runtime: Runtime) -> Step:
        if not self.options.iterations:
            return super().build_step(net, task, runtime)
        forward, stepper = runtime.forward_of(net), ModelStepper(net, self.plan, runtime)
        attack, classes = Attack(self.plan.image, self.options, runtime.device), len(self.plan.classes)

        def loss_of(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            with runtime.autocast():
                logits = forward(x)
            return logits, mean_loss(logits, y)

        def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            target = (y + torch.randint_like(y, 1, classes)) % classes if self.options.targeted else y
            net.eval()
            with using(net, "auxiliary"):
                adversarial = attack(x, lambda found: loss_of(found, target)[1] * stepper.loss_scale)
            net.train()
            with using(net, "halves"):
                logits, loss = loss_of(torch.cat([x, adversarial]), torch.cat([y, y]))
            stepper.step(loss)
            return logits[: len(y)].detach(), loss.detach()

        return step

    @override
    def predictor(self, task: RoundTask, private: Tensors, runtime: Runtime, *, use_offset: bool = True) -> Predictor:
        return ModulePredictor(load_weights(build_single(self.plan), without_auxiliary(task.shared)), runtime)
