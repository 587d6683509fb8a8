"""The double-input-channel model of DisTrans, and the single-channel one of the baselines.

x ──┬─ (1−α)x + αt ─ backbone ─ (dense) ─ z_L ─┐
    │                  same weights            ├─ [z_L; z_R] ─ logits
    └─ (1+α)x − αt ─ backbone ─ (dense) ─ z_R ─┘
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shared.backbones import Backbone, Stemmed, build_backbone
from shared.batchnorm import add_auxiliary, use_layers
from shared.method_options import ChannelBatchNorm, InputChannels
from shared.plan import FederationPlan
from shared.seeds import seeded


def blend(x: Tensor, offset: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """The two channels of Eq. 1 for a batch x (B, C, H, W) and one offset (C, H, W); nothing is clipped."""
    shift = alpha * offset
    return (1 - alpha) * x + shift, (1 + alpha) * x - shift


def batchnorms(net: nn.Module) -> list[_BatchNorm]:
    """The BatchNorm layers of a network."""
    return [module for module in net.modules() if isinstance(module, _BatchNorm)]


@contextmanager
def frozen_statistics(net: nn.Module) -> Iterator[None]:
    """Inside, BatchNorm in training normalises by the batch but leaves its running statistics and counters alone."""
    tracking = [layer for layer in batchnorms(net) if layer.track_running_stats]
    for layer in tracking:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in tracking:
            layer.track_running_stats = True


def _new_layer(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.kaiming_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class _Classifier(nn.Module):
    """A backbone, an optional dense layer, and logits over `channels` feature vectors side by side."""

    def __init__(self, backbone: Backbone, classes: int, dense_dim: int | None, channels: int) -> None:
        super().__init__()
        self.backbone = backbone.net
        width = dense_dim or backbone.dense_dim
        self.dense = _new_layer(backbone.features, width) if width else None
        self.logits = _new_layer(channels * (width or backbone.features), classes)
        self.has_batchnorm = bool(batchnorms(self.backbone))

    def features(self, x: Tensor | Stemmed) -> Tensor:
        """(B, C, H, W) → (B, d)."""
        z = self.backbone(x)
        return z if self.dense is None else self.dense(z)  # type: ignore[no-any-return]


class PairedDropout(nn.Dropout):
    """Drops the same features from both channels: from both halves of a batch, or in two passes one after the other."""

    _kept: Tensor | None = None

    def __init__(self, p: float, halves: bool) -> None:
        super().__init__(p)
        self.halves = halves

    def forward(self, x: Tensor) -> Tensor:
        """As dropout does, with one draw for both channels."""
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
    """Predicts from an image and the client's offset; the ablation with one input channel has the left one alone."""

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
        self._left_alone = input_channels == "single"
        self._stem = [backbone.stem] if backbone.stem else []  # in a list, so that it is not registered twice
        self._two_passes = self.has_batchnorm and batchnorm == "two-passes"
        if batchnorm == "separate":
            self.separate_batchnorm()
        if shared_dropout:
            _pair_dropout(self.backbone, halves=not self._two_passes)

    def separate_batchnorm(self) -> None:
        """Give each channel BatchNorm layers of its own; the right one's start as the left one's."""
        add_auxiliary(self.backbone)
        use_layers(self.backbone, "halves")

    def of_image(self, x: Tensor) -> Tensor | None:
        """What `forward` computes from the images alone, to be computed once for several offsets; None for nothing."""
        return self._stem[0].of_image(x) if self._stem else None

    def forward(self, x: Tensor, offset: Tensor, of_image: Tensor | None = None) -> Tensor:
        """(B, C, H, W), (C, H, W) → logits (B, classes); `of_image` as given by that method for these images."""
        if self._stem:
            stem = self._stem[0]
            left, right = stem.blend(stem.of_image(x) if of_image is None else of_image, offset, self.alpha)
        else:
            left, right = blend(x, offset, self.alpha)
        if self._left_alone:
            z = self._channel(left)
        elif self.training and self._two_passes:
            # Two passes: each channel is normalised by its own statistics, and both move the running ones.
            z = torch.cat([self._channel(left), self._channel(right)], dim=1)
        else:
            both = self._channel(torch.cat([left, right]))
            size = x.shape[0]  # not len(x), which torch.export would take for a constant
            z = torch.cat([both[:size], both[size:]], dim=1)
        return self.logits(z)  # type: ignore[no-any-return]

    def _channel(self, x: Tensor) -> Tensor:
        return self.features(Stemmed(x) if self._stem else x)


class SingleChannelModel(_Classifier):
    """The ordinary network of the baselines, without offset: the same backbone and dense layer."""

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
    """The plan's double-channel model, or its single-channel ablation, with its seeded random weights."""
    backbone, classes, dense_dim = _seeded_backbone(plan), len(plan.classes), plan.model.dense_dim
    with seeded(plan.seed, "head"):
        return DoubleChannelModel(backbone, classes, alpha, dense_dim, batchnorm, shared_dropout, input_channels)


def build_single(plan: FederationPlan) -> SingleChannelModel:
    """The plan's single-channel model with its seeded random weights; its backbone starts as the double one's does."""
    backbone, classes = _seeded_backbone(plan), len(plan.classes)
    with seeded(plan.seed, "head"):
        return SingleChannelModel(backbone, classes, plan.model.dense_dim)


def _seeded_backbone(plan: FederationPlan) -> Backbone:
    with seeded(plan.seed, "backbone"):
        return build_backbone(plan.model.backbone, plan.image, plan.model.activation)
