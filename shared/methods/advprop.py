"""AdvProp on FedAvg: each batch is trained on twice, as it is and as adversarial images.

Where the network has BatchNorm, adversarial images go through layers of their own: each BatchNorm layer has an
`auxiliary` twin, whose tensors are averaged with the rest or kept at the client. Prediction uses the main layers only.
A network without BatchNorm makes this plain training on clean and adversarial images, half and half.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from typing_extensions import override

from shared.batchnorm import add_auxiliary, using
from shared.initial_weights import fit_weights
from shared.method_options import AdvPropOptions
from shared.methods.base import Predictor, RoundTask, ServerState, Tensors, Update, Workplace, options_of
from shared.methods.fedavg import FedAvgClient, FedAvgServer
from shared.methods.local import ModelStepper, Step, mean_loss, run_local_epochs
from shared.methods.serving import ModulePredictor, detached_state, load_shared
from shared.model import build_single
from shared.plan import FederationPlan, ImagePlan
from shared.runtime import Runtime

_AUXILIARY = ".auxiliary."


def without_auxiliary(tensors: Tensors) -> Tensors:
    """The tensors of the plain network."""
    return {name: value for name, value in tensors.items() if _AUXILIARY not in name}


def only_auxiliary(tensors: Tensors) -> Tensors:
    """The twins' tensors."""
    return {name: value for name, value in tensors.items() if _AUXILIARY in name}


class Attack:
    """Makes adversarial images, within ε of the clean ones and within the range of pixels, per normalised channel."""

    def __init__(self, image: ImagePlan, options: AdvPropOptions, device: torch.device | None = None) -> None:
        mean, std = (torch.tensor(values, device=device).reshape(-1, 1, 1) for values in (image.mean, image.std))
        self.epsilon = options.epsilon / 255 / std
        self.step = max(options.step, options.epsilon / max(options.iterations, 1)) / 255 / std
        self.low, self.high = (0 - mean) / std, (1 - mean) / std
        self._options = options

    def __call__(self, x: Tensor, loss_at: Callable[[Tensor], Tensor]) -> Tensor:
        """Raise the loss, or lower it where that is the loss of another class; leaves no gradient behind."""
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


class AdvPropServer(FedAvgServer):
    """θ ← mean of θ_i, with the auxiliary layers or without them."""

    @override
    def build(self) -> nn.Module:
        return self._complete(build_single(self.plan))

    @override
    def initial_state(self, pretrained: Tensors | None = None) -> ServerState:
        """Plain weights will do: the auxiliary layers start as the main ones."""
        net = build_single(self.plan)
        if pretrained is not None:
            fit_weights(net, pretrained)
        return ServerState(shared=detached_state(self._complete(net)))

    def _complete(self, net: nn.Module) -> nn.Module:
        averaged = options_of(self.plan, AdvPropOptions).auxiliary_batchnorm == "averaged"
        return add_auxiliary(net) if averaged else net


class AdvPropClient(FedAvgClient):
    """Local SGD on clean and adversarial images; predicts with the main BatchNorm layers."""

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        self.options = options_of(plan, AdvPropOptions)

    @override
    def train(self, task: RoundTask, private: Tensors, workplace: Workplace) -> tuple[Update, Tensors]:
        runtime = workplace.runtime
        # Loaded before the twins are made, so that those which nobody sends start as the main layers.
        net = add_auxiliary(load_shared(build_single(self.plan), without_auxiliary(task.shared)))
        net.load_state_dict(only_auxiliary(task.shared) | private, strict=False)
        net = runtime.prepare(net).train()
        report = run_local_epochs(self.plan, task, net, workplace, self.step_on(net, task, runtime))
        trained = detached_state(net)
        if self.options.auxiliary_batchnorm == "averaged":
            return Update(trained, {}, report), {}
        return Update(without_auxiliary(trained), {}, report), only_auxiliary(trained)

    @override
    def step_on(self, net: nn.Module, task: RoundTask, runtime: Runtime) -> Step:
        if not self.options.iterations:
            return super().step_on(net, task, runtime)
        forward, stepper = runtime.forward_of(net), ModelStepper(net, self.plan, runtime)
        attack, classes = Attack(self.plan.image, self.options, runtime.device), len(self.plan.classes)

        def loss_of(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            with runtime.autocast():
                logits = forward(x)
            return logits, mean_loss(logits, y)

        def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            aim = (y + torch.randint_like(y, 1, classes)) % classes if self.options.targeted else y
            net.eval()
            with using(net, "auxiliary"):
                adversarial = attack(x, lambda found: loss_of(found, aim)[1] * stepper.loss_scale)
            net.train()
            with using(net, "halves"):
                logits, loss = loss_of(torch.cat([x, adversarial]), torch.cat([y, y]))
            stepper.step(loss)
            return logits[: len(y)].detach(), loss.detach()

        return step

    @override
    def predictor(self, task: RoundTask, private: Tensors, runtime: Runtime, *, use_offset: bool = True) -> Predictor:
        return ModulePredictor(load_shared(build_single(self.plan), without_auxiliary(task.shared)), runtime)
