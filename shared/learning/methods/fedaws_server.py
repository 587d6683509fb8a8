"""FedAwS at the coordinator: averages the features, keeps the rows of all classes and spreads them apart."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from shared.contract.method_options import FedAwSOptions
from shared.contract.plan import FederationPlan
from shared.learning.methods.base import (
    ClientRecord,
    Facts,
    PersonalUploads,
    RoundContext,
    ServerHalf,
    ServerState,
    options_of,
)
from shared.tensors.arrays import Array, Arrays, as_array, as_arrays
from shared.tensors.mean import RunningMean
from shared.tensors.names import PERSONAL, SHARED
from shared.tensors.spec import Entry, Spec

if TYPE_CHECKING:
    from torch import Tensor

ROWS, CLASSES, EVALUATION_ROWS = "rows", "classes", "evaluation_rows"
_SMALLEST_NORM = 1e-12  # as in torch's normalize


def _normalized(rows: Array) -> Array:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), _SMALLEST_NORM))


def spread_gradient(rows: Array, margin: float, nearest: int | None = None, scale: float = 1.0) -> Array:
    """Return the gradient of Σ_c Σ_{c' ≠ c} max(0, margin − scale × (1 − cos(w_c, w_c')))² for unit rows.

    With `nearest`, return the gradient of −Σ ‖w_c − w_c'‖² over each row's nearest rows instead.
    """
    cosines, others = rows @ rows.T, ~np.eye(len(rows), dtype=np.bool_)
    if nearest is None:
        slopes = 2 * scale * np.maximum(margin - scale * (1 - cosines), 0) * others
    else:
        count = min(nearest, len(rows) - 1)
        chosen = np.argsort(np.where(others, -cosines, 2), axis=1, kind="stable")[:, :count]
        slopes = np.zeros_like(cosines)
        np.put_along_axis(slopes, chosen, 2.0, axis=1)
    slopes = slopes + slopes.T  # each pair counts twice
    return np.asarray(slopes @ rows - (slopes * cosines).sum(axis=1, keepdims=True) * rows)


def spread_out(rows: Array, rate: float, options: FedAwSOptions) -> Array:
    """Return the rows, normalized, after the round's spread-out steps; computed in float64."""
    with np.errstate(over="ignore", invalid="ignore"):  # the result is checked before it is published
        wide = _normalized(rows.astype(np.float64))
        scale = 0.5 if options.spread_distance == "half-cosine" else 1.0
        if options.spread_reduction == "mean":
            rate /= len(rows) ** 2
        velocity = np.zeros_like(wide)
        for _ in range(options.spread_steps):
            gradient = spread_gradient(wide, options.spread_margin, options.nearest, scale)
            velocity = options.spread_momentum * velocity + gradient
            wide = _normalized(wide - rate * velocity)
        return wide.astype(np.float32)


class FedAwSServer(ServerHalf):
    """Averages the feature network, keeps all rows and spreads them apart."""

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        self.options = options_of(plan, FedAwSOptions)

    @override
    def initial_state(self, pretrained: "Mapping[str, Tensor] | None" = None) -> ServerState:
        import torch
        import torch.nn.functional as F
        from torch import nn

        from shared.learning.methods.fedaws import FeatureNet
        from shared.learning.methods.modules import detached_state
        from shared.learning.seeds import seeded
        from shared.learning.weight_fitting import fit_weights

        net = FeatureNet(self.plan)
        if pretrained is not None:
            fit_weights(net, pretrained)
        classes = len(self.plan.classes)
        # Equal rows would stay equal; these are orthonormal if there are enough dimensions.
        with seeded(self.plan.seed, "class-rows"):
            rows = F.normalize(torch.randn(classes, net.width), dim=1)
            if classes <= net.width:
                nn.init.orthogonal_(rows)
        return ServerState(as_arrays(detached_state(net)), {ROWS: as_array(rows)})

    @override
    def personal(self, state: ServerState, client: ClientRecord, round_: RoundContext) -> Arrays:
        """Return the rows to train (the client's own classes' or all) and the rows to predict with (all)."""
        own = np.array(self._trained(client), np.int64)
        tensors = {CLASSES: own, ROWS: state.private[ROWS][own]}
        if self._shows_all_rows:
            tensors[EVALUATION_ROWS] = state.private[ROWS]
        return tensors

    @override
    def personal_specs(self, facts: Facts) -> Sequence[Spec]:
        """Return one spec per number of classes a client may hold. Needs torch."""
        import torch

        from shared.learning.methods.fedaws import FeatureNet

        with torch.device("meta"):
            width = FeatureNet(self.plan).width
        classes = len(self.plan.classes)
        every = Entry((classes, width), "F32")
        shown = {EVALUATION_ROWS: every} if self._shows_all_rows else {}
        return [
            Spec({CLASSES: Entry((own,), "I64"), ROWS: Entry((own, width), "F32"), **shown})
            for own in range(classes + 1)
        ]

    @override
    def update_spec(self, facts: Facts) -> Spec:
        import torch

        from shared.learning.methods.fedaws import FeatureNet

        with torch.device("meta"):
            net = FeatureNet(self.plan)
            spec = Spec.of(net.state_dict()).prefixed(SHARED)
        return spec | Spec({PERSONAL + ROWS: Entry((len(self.plan.classes), net.width), "F32")})

    @override
    def stored_update_spec(self, shared: Spec, private: Spec, facts: Facts) -> Spec | None:
        return shared.prefixed(SHARED) | Spec({PERSONAL + ROWS: private.entries[ROWS]})

    @override
    def next_private(self, private: Mapping[str, Array], uploads: PersonalUploads, round_: RoundContext) -> Arrays:
        uploaded: dict[int, RunningMean] = {}
        for client, personal in uploads:
            for label in self._trained(client):  # a client cannot move rows it was not given
                row = personal[ROWS][label]
                if bool(row.any()):
                    uploaded.setdefault(label, RunningMean()).add({ROWS: row})
        rows = private[ROWS].copy()
        for label, mean in uploaded.items():
            rows[label] = mean.result()[ROWS]
        lr = self.plan.training.lr if self.options.spread_lr is None else self.options.spread_lr
        return {ROWS: spread_out(rows, self.options.spread * lr, self.options)}

    @property
    def _shows_all_rows(self) -> bool:
        return self.options.client_loss == "hinge" and self.options.evaluation_rows

    def _trained(self, client: ClientRecord) -> list[int]:
        every = self.options.client_loss == "cross-entropy"
        return [label for label, count in enumerate(client.class_counts) if count or every]
