"""FedAwS: clients with few classes pull features toward those classes' rows; the coordinator spreads the rows apart.

Image features g and rows w are unit vectors. A client minimizes max(0, margin − cos(g(x), w_y))² over its images, for θ
and for the rows of its own classes, the only rows it trains with. The coordinator averages θ, averages each class's row
over its clients, and then takes a step on Σ max(0, ν − (1 − cos(w_c, w_c')))² over pairs of rows. Rows of absent
clients do not change. Clients receive all rows separately, for prediction only. In FedRepo's variant, clients minimize
the cross-entropy over all rows instead, and train and upload all of them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from shared.contract.method_options import FedAwSOptions
from shared.contract.plan import FederationPlan
from shared.learning.methods.base import (
    ClientHalf,
    Predictor,
    RoundTask,
    TrainingContext,
    Update,
    options_of,
)
from shared.learning.methods.fedaws_server import CLASSES, EVALUATION_ROWS, ROWS
from shared.learning.methods.modules import ModulePredictor, detached_state, load_weights
from shared.learning.methods.training_loop import LocalTraining, ModelStepper, Step, make_sgd, mean_loss
from shared.learning.model import PlanFeatureExtractor
from shared.learning.runtime import Runtime
from shared.tensors.names import Tensors


class FeatureNet(PlanFeatureExtractor):
    """The plan's feature extractor, with normalized features."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → unit vectors (B, d)."""
        return F.normalize(self.features(x).float(), dim=1)


class _Nearest(FeatureNet):
    """A classifier from features and rows; logits are cosine / temperature."""

    rows: Tensor

    def __init__(self, plan: FederationPlan, rows: Tensor, temperature: float) -> None:
        super().__init__(plan)
        self.register_buffer("rows", rows)
        self.temperature = temperature

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, classes); a class whose row is all zeros gets the lowest cosine."""
        cosines = super().forward(x) @ self.rows.T
        return torch.where(self.rows.any(dim=1), cosines, -1.0) / self.temperature


def positive_loss(cosines: Tensor, margin: float) -> Tensor:
    """Return the mean of max(0, margin − cosine)²."""
    return (margin - cosines).clamp(min=0).square().mean()


class FedAwSClient(ClientHalf):
    """Trains the features and its own rows; predicts among all rows it receives."""

    can_adapt = False  # its own loss spreads rows apart, which cross-entropy steps would undo

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        self.options = options_of(plan, FedAwSOptions)

    @override
    def train(self, task: RoundTask, private: Tensors, context: TrainingContext) -> tuple[Update, Tensors]:
        runtime = context.runtime
        net = runtime.prepare(load_weights(FeatureNet(self.plan), task.shared)).train()
        rows = self._own_rows(task).to(runtime.device).requires_grad_()
        report = LocalTraining(self.plan, task, context).run(net, self._build_step(net, rows, runtime))
        own = task.personal[CLASSES]
        uploaded = torch.zeros_like(rows, device="cpu")
        uploaded[own] = F.normalize(rows.detach().cpu()[own], dim=1)
        return Update(detached_state(net), {ROWS: uploaded}, report), private

    def _build_step(self, net: FeatureNet, rows: Tensor, runtime: Runtime) -> Step:
        optimizer = make_sgd(net, self.plan.training)
        optimizer.add_param_group({"params": [rows]})
        forward, stepper = runtime.forward_of(net), ModelStepper(net, self.plan, runtime, optimizer)
        known = rows.detach().any(dim=1)

        def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            with runtime.autocast():
                features = forward(x)
            cosines = features @ F.normalize(rows, dim=1).T
            if self.options.client_loss == "cross-entropy":
                loss = mean_loss(cosines / self.options.temperature, y)
                stepper.step(loss)
                return cosines.detach(), loss.detach()
            # Images of a class the coordinator does not know about have no row.
            own = cosines.gather(1, y[:, None])[known[y]]
            loss = positive_loss(own, self.options.margin) if len(own) else cosines.sum() * 0
            stepper.step(loss)
            return torch.where(known, cosines.detach(), -1.0), loss.detach()

        return step

    def _own_rows(self, task: RoundTask) -> Tensor:
        """Return (classes, d) with the client's own rows, and zeros elsewhere."""
        own = task.personal[ROWS]
        rows = own.new_zeros(len(self.plan.classes), own.shape[1])
        rows[task.personal[CLASSES]] = own
        return rows

    @override
    def predictor(self, task: RoundTask, private: Tensors, runtime: Runtime, *, use_offset: bool = True) -> Predictor:
        rows = task.personal[EVALUATION_ROWS] if EVALUATION_ROWS in task.personal else self._own_rows(task)
        net = load_weights(_Nearest(self.plan, rows, self.options.temperature), task.shared | {ROWS: rows})
        return ModulePredictor(net, runtime)
