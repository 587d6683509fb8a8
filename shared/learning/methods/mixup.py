"""mixup on FedAvg: clients train on mixtures of pairs of their images, with labels mixed the same way."""

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from shared.contract.method_options import MixupOptions
from shared.contract.plan import FederationPlan
from shared.contract.seeds import derive_seed
from shared.learning.methods.base import RoundTask, options_of
from shared.learning.methods.fedavg import FedAvgClient
from shared.learning.methods.training_loop import ModelStepper, Step, mean_loss
from shared.learning.runtime import Runtime


def mix(x: Tensor, partners: Tensor, share: float) -> Tensor:
    """Return share × x + (1 − share) × its partner for each image; `partners` are indices into the batch."""
    return share * x + (1 - share) * x[partners]


def mixed_loss(logits: Tensor, y: Tensor, partners: Tensor, share: float) -> Tensor:
    """Return the cross-entropy with labels mixed like the images."""
    return share * mean_loss(logits, y) + (1 - share) * mean_loss(logits, y[partners])


class MixupClient(FedAvgClient):
    """Draws one share and one pairing per batch; predicts on unmixed images."""

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        self.options = options_of(plan, MixupOptions)

    @override
    def build_step(self, net: nn.Module, task: RoundTask, runtime: Runtime) -> Step:
        alpha = self.options.alpha
        if alpha == 0:
            return super().build_step(net, task, runtime)
        forward, stepper = runtime.forward_of(net), ModelStepper(net, self.plan, runtime)
        # A separate generator, so that dropout draws the same numbers as without mixing.
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
