"""FedAwS: clients with few classes pull features toward those classes' rows; the coordinator spreads the rows apart.

Image features g and rows w are unit vectors. A client minimizes max(0, margin − cos(g(x), w_y))² over its images, for θ
and for the rows of its own classes, the only rows it trains with. The coordinator averages θ, averages each class's row
over its clients, and then takes a step on Σ max(0, ν − (1 − cos(w_c, w_c')))² over pairs of rows. Rows of absent
clients do not change. Clients receive all rows separately, for prediction only. In FedRepo's variant, clients minimize
the cross-entropy over all rows instead, and train and upload all of them.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from shared.contract.method_options import FedAwSOptions
from shared.contract.plan import FederationPlan
from shared.learning.methods.base import (
    ClientHalf,
    ClientRecord,
    Facts,
    PersonalUploads,
    Predictor,
    RoundContext,
    RoundTask,
    ServerHalf,
    ServerState,
    TrainingContext,
    Update,
    options_of,
)
from shared.learning.methods.modules import ModulePredictor, detached_state, load_weights
from shared.learning.methods.training_loop import LocalTraining, ModelStepper, Step, make_sgd, mean_loss
from shared.learning.model import PlanFeatureExtractor
from shared.learning.runtime import Runtime
from shared.learning.seeds import seeded
from shared.learning.weight_fitting import fit_weights
from shared.tensors.mean import RunningMean
from shared.tensors.names import PERSONAL, SHARED, Tensors
from shared.tensors.spec import Entry, Spec

_ROWS, _CLASSES, _EVALUATION_ROWS = "rows", "classes", "evaluation_rows"


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


def spread_gradient(rows: Tensor, margin: float, nearest: int | None = None, scale: float = 1.0) -> Tensor:
    """Return the gradient of Σ_c Σ_{c' ≠ c} max(0, margin − scale × (1 − cos(w_c, w_c')))² for unit rows.

    With `nearest`, return the gradient of −Σ ‖w_c − w_c'‖² over each row's nearest rows instead.
    """
    cosines, others = rows @ rows.T, ~torch.eye(len(rows), dtype=torch.bool)
    if nearest is None:
        slopes = 2 * scale * (margin - scale * (1 - cosines)).clamp(min=0) * others
    else:
        count = min(nearest, len(rows) - 1)
        chosen = cosines.masked_fill(~others, -2).topk(count, dim=1).indices
        slopes = torch.zeros_like(cosines).scatter_(1, chosen, 2.0)
    slopes = slopes + slopes.T  # each pair counts twice
    return slopes @ rows - (slopes * cosines).sum(dim=1, keepdim=True) * rows


def spread_out(rows: Tensor, rate: float, options: FedAwSOptions) -> Tensor:
    """Return the rows, normalized, after the round's spread-out steps; computed in float64."""
    wide = F.normalize(rows.double(), dim=1)
    scale = 0.5 if options.spread_distance == "half-cosine" else 1.0
    if options.spread_reduction == "mean":
        rate /= len(rows) ** 2
    velocity = torch.zeros_like(wide)
    for _ in range(options.spread_steps):
        gradient = spread_gradient(wide, options.spread_margin, options.nearest, scale)
        velocity = options.spread_momentum * velocity + gradient
        wide = F.normalize(wide - rate * velocity, dim=1)
    return wide.float()


class FedAwSServer(ServerHalf):
    """Averages the feature network, keeps all rows and spreads them apart."""

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        self.options = options_of(plan, FedAwSOptions)

    @override
    def initial_state(self, pretrained: Tensors | None = None) -> ServerState:
        net = FeatureNet(self.plan)
        if pretrained is not None:
            fit_weights(net, pretrained)
        classes = len(self.plan.classes)
        # Equal rows would stay equal; these are orthonormal if there are enough dimensions.
        with seeded(self.plan.seed, "class-rows"):
            rows = F.normalize(torch.randn(classes, net.width), dim=1)
            if classes <= net.width:
                nn.init.orthogonal_(rows)
        return ServerState(detached_state(net), {_ROWS: rows})

    @override
    def personal(self, state: ServerState, client: ClientRecord, round_: RoundContext) -> Tensors:
        """Return the rows to train (the client's own classes' or all) and the rows to predict with (all)."""
        own = torch.tensor(self._trained(client), dtype=torch.int64)
        tensors = {_CLASSES: own, _ROWS: state.private[_ROWS][own]}
        if self._shows_all_rows:
            tensors[_EVALUATION_ROWS] = state.private[_ROWS]
        return tensors

    @override
    def personal_specs(self, facts: Facts) -> Sequence[Spec]:
        """Return one spec per number of classes a client may hold."""
        with torch.device("meta"):
            width = FeatureNet(self.plan).width
        classes = len(self.plan.classes)
        every = Entry((classes, width), torch.float32)
        shown = {_EVALUATION_ROWS: every} if self._shows_all_rows else {}
        return [
            Spec({_CLASSES: Entry((own,), torch.int64), _ROWS: Entry((own, width), torch.float32), **shown})
            for own in range(classes + 1)
        ]

    @override
    def update_spec(self, facts: Facts) -> Spec:
        with torch.device("meta"):
            net = FeatureNet(self.plan)
            spec = Spec.of(net.state_dict()).prefixed(SHARED)
        return spec | Spec({PERSONAL + _ROWS: Entry((len(self.plan.classes), net.width), torch.float32)})

    @override
    def finish(self, state: ServerState, mean: Tensors, uploads: PersonalUploads, round_: RoundContext) -> ServerState:
        uploaded: dict[int, RunningMean] = {}
        for client, personal in uploads:
            for label in self._trained(client):  # a client cannot move rows it was not given
                if bool(personal[_ROWS][label].any()):
                    uploaded.setdefault(label, RunningMean()).add({_ROWS: personal[_ROWS][label]})
        rows = state.private[_ROWS].clone()
        for label, row in uploaded.items():
            rows[label] = row.result()[_ROWS]
        lr = self.plan.training.lr if self.options.spread_lr is None else self.options.spread_lr
        return ServerState(mean, {_ROWS: spread_out(rows, self.options.spread * lr, self.options)})

    @property
    def _shows_all_rows(self) -> bool:
        return self.options.client_loss == "hinge" and self.options.evaluation_rows

    def _trained(self, client: ClientRecord) -> list[int]:
        every = self.options.client_loss == "cross-entropy"
        return [label for label, count in enumerate(client.class_counts) if count or every]


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
        own = task.personal[_CLASSES]
        uploaded = torch.zeros_like(rows, device="cpu")
        uploaded[own] = F.normalize(rows.detach().cpu()[own], dim=1)
        return Update(detached_state(net), {_ROWS: uploaded}, report), private

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
        own = task.personal[_ROWS]
        rows = own.new_zeros(len(self.plan.classes), own.shape[1])
        rows[task.personal[_CLASSES]] = own
        return rows

    @override
    def predictor(self, task: RoundTask, private: Tensors, runtime: Runtime, *, use_offset: bool = True) -> Predictor:
        rows = task.personal[_EVALUATION_ROWS] if _EVALUATION_ROWS in task.personal else self._own_rows(task)
        net = load_weights(_Nearest(self.plan, rows, self.options.temperature), task.shared | {_ROWS: rows})
        return ModulePredictor(net, runtime)
