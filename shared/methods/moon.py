"""MOON: FedAvg whose clients also draw an image's projection towards the global model's and away from their last one's.

features → Linear ReLU Linear → z (projection) → logits

The loss is cross-entropy + μ × −log( e^{cos(z, z_g)/τ} / (e^{cos(z, z_g)/τ} + Σ e^{cos(z, z_p)/τ}) ), with z_g from the
round's global model and z_p from the client's own models after its last rounds, both frozen and in eval mode. A client
that has no earlier model leaves the term out. Its models are private; prediction is with the global one.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from shared.method_options import MoonOptions
from shared.methods.base import (
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
from shared.methods.local import ModelStepper, Step, mean_loss, run_local_epochs
from shared.methods.serving import ModulePredictor, cut, detached_state, load_shared, prefixed
from shared.model import SingleChannelModel, build_single
from shared.plan import FederationPlan
from shared.runtime import Runtime
from shared.seeds import seeded

_PREVIOUS, _MOMENTUM = "previous.", "momentum."
_STATISTICS = ("running_mean", "running_var")  # momentum could carry a variance below zero


class MoonModel(nn.Module):
    """The plan's single-channel model with a projection between its features and its logits."""

    def __init__(self, single: SingleChannelModel, classes: int, width: int) -> None:
        super().__init__()
        self.backbone, self.dense = single.backbone, single.dense
        features = single.logits.in_features
        self.projection = nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, width))
        self.logits = nn.Linear(width, classes)
        nn.init.kaiming_uniform_(self.logits.weight)
        nn.init.zeros_(self.logits.bias)

    def project(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → z (B, width)."""
        features = self.backbone(x)
        return self.projection(features if self.dense is None else self.dense(features))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C, H, W) → logits (B, classes) and z (B, width)."""
        z = self.project(x)
        return self.logits(z), z


class _Predicting(MoonModel):
    """The same network, without its projection for an output."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """(B, C, H, W) → logits (B, classes)."""
        return super().forward(x)[0]


Model = TypeVar("Model", bound=MoonModel)


def build_moon(plan: FederationPlan, kind: type[Model]) -> Model:
    """The network with its seeded random weights; its backbone starts as every method's does."""
    single = build_single(plan)
    with seeded(plan.seed, "projection"):
        return kind(single, len(plan.classes), options_of(plan, MoonOptions).projection_dim)


def contrast(z: Tensor, of_global: Tensor, of_previous: Sequence[Tensor], temperature: float) -> Tensor:
    """The contrastive term, averaged over the batch; zero without previous projections."""
    others = [of_global, *of_previous]
    nearness = torch.stack([F.cosine_similarity(z, other, dim=1) for other in others], dim=1) / temperature
    return F.cross_entropy(nearness, torch.zeros(len(z), dtype=torch.int64, device=z.device))


class MoonServer(FedAvgServer):
    """θ ← mean of θ_i, with momentum over rounds where the plan asks for it."""

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        self.options = options_of(plan, MoonOptions)

    @override
    def build(self) -> nn.Module:
        return build_moon(self.plan, MoonModel)

    @override
    def finish(
        self,
        state: ServerState,
        mean: Tensors,
        uploads: Iterable[tuple[ClientRecord, Tensors]],
        roster: Sequence[ClientRecord],
        facts: Facts,
    ) -> ServerState:
        keep = self.options.server_momentum
        if not keep:
            return ServerState(shared=mean)
        shared, velocity = dict(mean), Tensors()
        for name, value in mean.items():
            if value.is_floating_point() and not name.endswith(_STATISTICS):
                before = state.shared[name]
                velocity[name] = (1 - keep) * (before - value)
                if _MOMENTUM + name in state.private:
                    velocity[name] += keep * state.private[_MOMENTUM + name]
                shared[name] = before - velocity[name]
        return ServerState(shared, prefixed(velocity, _MOMENTUM))


class MoonClient(ClientHalf):
    """Local SGD on both terms; keeps its trained model for the next time."""

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        self.options = options_of(plan, MoonOptions)

    @override
    def train(self, task: RoundTask, private: Tensors, workplace: Workplace) -> tuple[Update, Tensors]:
        runtime = workplace.runtime
        net = runtime.prepare(load_shared(build_moon(self.plan, MoonModel), task.shared)).train()
        pool = [cut(private, f"{_PREVIOUS}{number}.") for number in range(self.options.previous_models)]
        pool = [model for model in pool if model]
        report = run_local_epochs(self.plan, task, net, workplace, self._step_on(net, task.shared, pool, runtime))
        trained = detached_state(net)
        kept = Tensors()
        for number, model in enumerate([trained, *pool][: self.options.previous_models]):
            kept |= prefixed(model, f"{_PREVIOUS}{number}.")
        return Update(trained, {}, report), kept

    def _step_on(self, net: MoonModel, of_round: Tensors, pool: Sequence[Tensors], runtime: Runtime) -> Step:
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
        return runtime.prepare(load_shared(build_moon(self.plan, MoonModel), weights)).eval().requires_grad_(False)

    @override
    def predictor(self, task: RoundTask, private: Tensors, runtime: Runtime, *, use_offset: bool = True) -> Predictor:
        return ModulePredictor(load_shared(build_moon(self.plan, _Predicting), task.shared), runtime)
