"""mixup on FedAvg: a client trains on mixtures of pairs of its own images, with the labels mixed alike."""

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from shared.method_options import MixupOptions
from shared.methods.base import RoundTask, options_of
from shared.methods.fedavg import FedAvgClient
from shared.methods.local import ModelStepper, Step, mean_loss
from shared.plan import FederationPlan
from shared.runtime import Runtime
from shared.seeds import derive_seed


def mix(x: Tensor, partners: Tensor, share: float) -> Tensor:
    """share × x + (1 − share) × its partner, for each image of the batch; `partners` are positions in it."""
    return share * x + (1 - share) * x[partners]


def mixed_loss(logits: Tensor, y: Tensor, partners: Tensor, share: float) -> Tensor:
    """Cross-entropy with labels mixed as the images are."""
    return share * mean_loss(logits, y) + (1 - share) * mean_loss(logits, y[partners])


class MixupClient(FedAvgClient):
    """Draws one share and one pairing a batch; predicts on images as they are."""

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        self.options = options_of(plan, MixupOptions)

    @override
    def step_on(self, net: nn.Module, task: RoundTask, runtime: Runtime) -> Step:
        alpha = self.options.alpha
        if alpha == 0:
            return super().step_on(net, task, runtime)
        forward, stepper = runtime.forward_of(net), ModelStepper(net, self.plan, runtime)
        # A source of its own: dropout draws as it would without mixing.
        random = np.random.default_rng(derive_seed(self.plan.seed, "mixup", task.client_id, task.round))

        def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            share = float(random.beta(alpha, alpha))
            partners = torch.from_numpy(random.permutation(len(y))).to(y.device)
            with runtime.autocast():
                logits = forward(mix(x, partners, share))
            loss = mixed_loss(logits, y, partners, share)
            stepper.step(loss)
            return logits.detach(), loss.detach()

        return step
