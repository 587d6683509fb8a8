"""MOON: FedAvg with a contrastive term that pulls projections toward the global model's and away from older ones.

features → Linear ReLU Linear → z (projection) → logits

The loss is cross-entropy + μ × −log( e^{cos(z, z_g)/τ} / (e^{cos(z, z_g)/τ} + Σ e^{cos(z, z_p)/τ}) ), with z_g from the
round's global model and z_p from the client's own models of its last rounds, both frozen and in eval mode. Clients
without an earlier model omit the term. Their models are private; they predict with the global one.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from shared.contract.method_options import MoonOptions
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
from shared.learning.methods.training_loop import LocalTraining, ModelStepper, Step, mean_loss
from shared.learning.model import PlanFeatureExtractor, new_layer
from shared.learning.runtime import Runtime
from shared.learning.seeds import seeded
from shared.tensors.names import Tensors, add_prefix, strip_prefix

_PREVIOUS = "previous."


class MoonModel(PlanFeatureExtractor):
    """The plan's feature extractor with a projection between features and logits."""

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        inputs, outputs = self.width, options_of(plan, MoonOptions).projection_dim
        with seeded(plan.seed, "projection"):
            self.projection = nn.Sequential(nn.Linear(inputs, inputs), nn.ReLU(), nn.Linear(inputs, outputs))
            self.logits = new_layer(outputs, len(plan.classes))

    def project(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → z (B, projection_dim)."""
        return self.projection(self.features(x))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C, H, W) → logits (B, classes) and z (B, projection_dim)."""
        z = self.project(x)
        return self.logits(z), z


class _Predicting(MoonModel):
    """The same network without the projection in its output."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """(B, C, H, W) → logits (B, classes)."""
        return super().forward(x)[0]


def contrast(z: Tensor, of_global: Tensor, of_previous: Sequence[Tensor], temperature: float) -> Tensor:
    """Return the contrastive term, averaged over the batch; zero without previous projections."""
    others = [of_global, *of_previous]
    nearness = torch.stack([F.cosine_similarity(z, other, dim=1) for other in others], dim=1) / temperature
    return F.cross_entropy(nearness, torch.zeros(len(z), dtype=torch.int64, device=z.device))


class MoonClient(ClientHalf):
    """Trains on both terms with SGD; keeps its trained model for the next rounds."""

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        self.options = options_of(plan, MoonOptions)

    @override
    def train(self, task: RoundTask, private: Tensors, context: TrainingContext) -> tuple[Update, Tensors]:
        runtime = context.runtime
        net = runtime.prepare(load_weights(MoonModel(self.plan), task.shared)).train()
        pool = [strip_prefix(private, f"{_PREVIOUS}{number}.") for number in range(self.options.previous_models)]
        pool = [model for model in pool if model]
        report = LocalTraining(self.plan, task, context).run(net, self._build_step(net, task.shared, pool, runtime))
        trained = detached_state(net)
        kept = Tensors()
        for number, model in enumerate([trained, *pool][: self.options.previous_models]):
            kept |= add_prefix(model, f"{_PREVIOUS}{number}.")
        return Update(trained, {}, report), kept

    def _build_step(self, net: MoonModel, of_round: Tensors, pool: Sequence[Tensors], runtime: Runtime) -> Step:
        forward, stepper = runtime.forward_of(net), ModelStepper(net, self.plan, runtime)
        mu, temperature = self.options.mu, self.options.temperature
        contrasts = bool(pool) and mu > 0
        frozen = [self._frozen(weights, runtime) for weights in (of_round, *pool)] if contrasts else []

        def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            with runtime.autocast():
                logits, z = forward(x)
                with torch.no_grad():
                    of_global, *of_previous = [model.project(x).float() for model in frozen] or [z]
            loss = total = mean_loss(logits, y)
            if contrasts:
                total = loss + mu * contrast(z.float(), of_global, of_previous, temperature)
            stepper.step(total)
            return logits.detach(), loss.detach()

        return step

    def _frozen(self, weights: Tensors, runtime: Runtime) -> MoonModel:
        return runtime.prepare(load_weights(MoonModel(self.plan), weights)).eval().requires_grad_(False)

    @override
    def predictor(self, task: RoundTask, private: Tensors, runtime: Runtime, *, use_offset: bool = True) -> Predictor:
        return ModulePredictor(load_weights(_Predicting(self.plan), task.shared), runtime)
