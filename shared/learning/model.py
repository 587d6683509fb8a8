"""DisTrans' double-input-channel model and the baselines' single-channel model.

x ──┬─ (1−α)x + αt ─ backbone ─ (dense) ─ z_L ─┐
    │                  same weights            ├─ [z_L; z_R] ─ logits
    └─ (1+α)x − αt ─ backbone ─ (dense) ─ z_R ─┘
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shared.contract.method_options import ChannelBatchNorm, InputChannels
from shared.contract.plan import FederationPlan
from shared.learning.backbones import Backbone, Stemmed, build_backbone
from shared.learning.batchnorm import add_auxiliary, use_layers
from shared.learning.initialization import kaiming
from shared.learning.seeds import seeded


def blend(x: Tensor, offset: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Return the two channels of Eq. 1 for a batch x (B, C, H, W) and one offset (C, H, W), unclipped."""
    shift = alpha * offset
    return (1 - alpha) * x + shift, (1 + alpha) * x - shift


def batchnorms(net: nn.Module) -> list[_BatchNorm]:
    """Return a network's BatchNorm layers."""
    return [module for module in net.modules() if isinstance(module, _BatchNorm)]


@contextmanager
def frozen_statistics(net: nn.Module) -> Iterator[None]:
    """Keep BatchNorm from updating its running statistics and counters; it still normalizes by the batch."""
    tracking = [layer for layer in batchnorms(net) if layer.track_running_stats]
    for layer in tracking:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in tracking:
            layer.track_running_stats = True


def new_layer(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear layer with random weights and zero bias."""
    return kaiming(nn.Linear(inputs, outputs))


class FeatureExtractor(nn.Module):
    """A backbone and an optional dense layer, which every method's model starts with."""

    def __init__(self, backbone: Backbone, dense_dim: int | None) -> None:
        super().__init__()
        self.backbone = backbone.net
        width = dense_dim or backbone.dense_dim
        self.dense = new_layer(backbone.features, width) if width else None
        self.width = width or backbone.features

    def features(self, x: Tensor | Stemmed) -> Tensor:
        """(B, C, H, W) → (B, d)."""
        z = self.backbone(x)
        return z if self.dense is None else self.dense(z)  # type: ignore[no-any-return]


class _Classifier(FeatureExtractor):
    """A feature extractor with logits over the concatenated features of `channels` channels."""

    def __init__(self, backbone: Backbone, classes: int, dense_dim: int | None, channels: int) -> None:
        super().__init__(backbone, dense_dim)
        self.logits = new_layer(channels * self.width, classes)


class PairedDropout(nn.Dropout):
    """Dropout that drops the same features in both channels: both halves of a batch, or two consecutive passes."""

    _kept: Tensor | None = None

    def __init__(self, p: float, halves: bool) -> None:
        super().__init__(p)
        self.halves = halves

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout with one draw for both channels."""
        if not self.training:
            return x
        if self.halves:
            kept = super().forward(torch.ones_like(x[: x.shape[0] // 2]))
            return x * torch.cat([kept, kept])
        if self._kept is None:
            self._kept = super().forward(torch.ones_like(x))
            return x * self._kept
        kept, self._kept = self._kept, None
        return x * kept


class DoubleChannelModel(_Classifier):
    """Classifies an image together with the client's offset; the single-channel ablation has only the left channel."""

    def __init__(
        self,
        backbone: Backbone,
        classes: int,
        alpha: float,
        dense_dim: int | None = None,
        batchnorm: ChannelBatchNorm = "two-passes",
        shared_dropout: bool = False,
        input_channels: InputChannels = "double",
    ) -> None:
        super().__init__(backbone, classes, dense_dim, channels=2 if input_channels == "double" else 1)
        self.alpha = alpha
        self._is_single_channel = input_channels == "single"
        self._stem = [backbone.stem] if backbone.stem else []  # in a list to keep it from being registered twice
        self._two_passes = batchnorm == "two-passes" and bool(batchnorms(self.backbone))
        if batchnorm == "separate":
            self.separate_batchnorm()
        if shared_dropout:
            _pair_dropout(self.backbone, halves=not self._two_passes)

    def separate_batchnorm(self) -> None:
        """Give each channel its own BatchNorm layers; the right channel's start as copies of the left's."""
        add_auxiliary(self.backbone)
        use_layers(self.backbone, "halves")

    @contextmanager
    def blending(self, alpha: float) -> Iterator[None]:
        """Use another α for a while; with 0, both channels see the unmodified image."""
        before, self.alpha = self.alpha, alpha
        try:
            yield
        finally:
            self.alpha = before

    def image_term(self, x: Tensor) -> Tensor | None:
        """Return the part of `forward` that does not depend on the offset, for reuse; None if there is none."""
        return self._stem[0].image_term(x) if self._stem else None

    def forward(self, x: Tensor, offset: Tensor, image_term: Tensor | None = None) -> Tensor:
        """(B, C, H, W), (C, H, W) → logits (B, classes); `image_term` is that method's result for x, if known."""
        if self._stem:
            stem = self._stem[0]
            left, right = stem.blend(stem.image_term(x) if image_term is None else image_term, offset, self.alpha)
        else:
            left, right = blend(x, offset, self.alpha)
        if self._is_single_channel:
            z = self._channel(left)
        elif self.training and self._two_passes:
            # Each channel is normalized by its own batch statistics, and both update the running ones.
            z = torch.cat([self._channel(left), self._channel(right)], dim=1)
        else:
            both = self._channel(torch.cat([left, right]))
            size = x.shape[0]  # not len(x), which torch.export would treat as a constant
            z = torch.cat([both[:size], both[size:]], dim=1)
        return self.logits(z)  # type: ignore[no-any-return]

    def _channel(self, x: Tensor) -> Tensor:
        return self.features(Stemmed(x) if self._stem else x)


class SingleChannelModel(_Classifier):
    """The baselines' plain network, without an offset but with the same backbone and dense layer."""

    def __init__(self, backbone: Backbone, classes: int, dense_dim: int | None = None) -> None:
        super().__init__(backbone, classes, dense_dim, channels=1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → logits (B, classes)."""
        return self.logits(self.features(x))  # type: ignore[no-any-return]


def _pair_dropout(net: nn.Module, *, halves: bool) -> None:
    for name, child in list(net.named_children()):
        if type(child) is nn.Dropout:
            setattr(net, name, PairedDropout(child.p, halves))
        else:
            _pair_dropout(child, halves=halves)


def build_double(
    plan: FederationPlan,
    alpha: float,
    batchnorm: ChannelBatchNorm = "two-passes",
    shared_dropout: bool = False,
    input_channels: InputChannels = "double",
) -> DoubleChannelModel:
    """Build the plan's double-channel model, or its single-channel ablation, with seeded random weights."""
    backbone, classes, dense_dim = _seeded_backbone(plan), len(plan.classes), plan.model.dense_dim
    with seeded(plan.seed, "head"):
        return DoubleChannelModel(backbone, classes, alpha, dense_dim, batchnorm, shared_dropout, input_channels)


def build_single(plan: FederationPlan) -> SingleChannelModel:
    """Build the plan's single-channel model; its backbone has the same seeded random weights as the double one's."""
    backbone, classes = _seeded_backbone(plan), len(plan.classes)
    with seeded(plan.seed, "head"):
        return SingleChannelModel(backbone, classes, plan.model.dense_dim)


def _seeded_backbone(plan: FederationPlan) -> Backbone:
    with seeded(plan.seed, "backbone"):
        return build_backbone(plan.model.backbone, plan.image, plan.model.activation, plan.model.initialization)


class PlanFeatureExtractor(FeatureExtractor):
    """The plan's feature extractor, with the same seeded random weights as in `build_single`."""

    def __init__(self, plan: FederationPlan) -> None:
        backbone = _seeded_backbone(plan)
        with seeded(plan.seed, "head"):
            super().__init__(backbone, plan.model.dense_dim)
