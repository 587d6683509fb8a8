"""The settings of each method, as they stand in a plan's `[method]` table. The names follow the paper."""

from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.plan_faults import FieldsDisagree


class Frozen(BaseModel):
    """Base of all plan tables: unknown keys are errors, values never change, numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


OffsetOptimizer = Literal["sgd", "adam", "sign-sgd"]
ChannelBatchNorm = Literal["two-passes", "joint", "separate"]
InputChannels = Literal["double", "single"]

# The paper's rate moves the offset by about one part in a million over an epoch; the others move it visibly.
DEFAULT_OFFSET_LR: dict[OffsetOptimizer, float] = {"sgd": 1e-3, "adam": 0.05, "sign-sgd": 0.02}


class GeneratorOptions(Frozen):
    """The offset aggregation network and how the coordinator trains it."""

    inputs: Literal["embedding", "embedding+offset"] = Field(
        "embedding", description="What the network sees of a client: its class embedding, and also its last offset."
    )
    hidden: int = Field(100, ge=1, le=4096, description="Width of the fully connected layers.")
    width: int = Field(512, ge=8, le=4096, description="Channels after the first transposed convolution.")
    optimizer: Literal["sgd", "adam"] = Field("sgd", description="Optimiser of the regression.")
    lr: float = Field(1e-2, ge=0, le=10, description="Its learning rate.")
    steps: int = Field(1, ge=1, le=1000, description="Regression steps per client and round.")
    reduction: Literal["mean", "sum"] = Field("mean", description="Squared error averaged or summed over pixels.")
    mix: float = Field(1.0, ge=0, le=1, description="A client is sent mix × network output + (1 − mix) × its own.")


class DistransOptions(Frozen):
    """DisTrans: a double-input-channel model with one offset per client."""

    name: Literal["distrans"] = "distrans"
    alpha: float = Field(0.3, ge=0, le=1, description="Blend factor α of Eq. 1.")
    input_channels: InputChannels = Field(
        "double", description="Both channels of Eq. 1; or, as an ablation, (1 − α) x + α t alone, with a head for one."
    )
    update_rule: Literal["alternating", "joint"] = Field(
        "alternating",
        description="Algorithm 1: the offset first, then the model at the new offset; or both from one backward pass.",
    )
    offset_optimizer: OffsetOptimizer = Field("sgd", description="Optimiser of the offset; made anew each round.")
    offset_lr: float | None = Field(
        None, ge=0, le=100, description="Its rate; unset: 1e-3 (sgd), 0.05 (adam), 0.02 (sign-sgd). 0 freezes offsets."
    )
    offset_bound: float | None = Field(
        None,
        gt=0,
        le=100,
        description="How far a value of the offset may move from its start or, where offsets are or were aggregated, "
        "from what was sent last; unset: any distance.",
    )
    bounded_clients: Literal["single-class", "all", "none"] = Field(
        "single-class",
        description="Whose offsets are bounded. One that is free at a client with a single class ends as a key for it.",
    )
    offset_gradient: Literal["mean", "sum"] = Field(
        "mean", description="Gradient of the offset averaged or summed over the images of a batch."
    )
    offset_init: Literal["uniform", "imagenet", "normal", "zeros", "generator"] = Field(
        "uniform",
        description="First offset: U[0,1) pixels normalised by the plan's statistics, or by ImageNet's; N(0,1); "
        "zeros; or the output of the untrained aggregation network.",
    )
    shared_offset: bool = Field(False, description="Control: one and the same offset for all clients.")
    offset_aggregation: Literal["auto", "none", "mean", "network"] = Field(
        "auto", description="auto: network while DH is below the threshold, else none."
    )
    dh_threshold: float = Field(0.5, ge=0, le=1, description="Threshold of auto; strict.")
    offset_backup: bool = Field(
        False,
        description="Where offsets are not aggregated: the coordinator keeps a copy of each client's, for an agent "
        "that has lost its state.",
    )
    batchnorm: ChannelBatchNorm = Field(
        "two-passes",
        description="BatchNorm in training: each channel by its own batch, with common running statistics; both by one "
        "batch of twice the size; or layers of its own for each channel.",
    )
    batchnorm_statistics: Literal["averaged", "private"] = Field(
        "averaged", description="BatchNorm's running statistics: averaged like weights, or kept at each client."
    )
    shared_dropout: bool = Field(False, description="Dropout leaves out the same features in both channels.")
    generator: GeneratorOptions = GeneratorOptions()

    @property
    def effective_offset_lr(self) -> float:
        """The offset's learning rate, with the optimiser's default where the plan names none."""
        return DEFAULT_OFFSET_LR[self.offset_optimizer] if self.offset_lr is None else self.offset_lr

    @model_validator(mode="after")
    def _two_channels_to_treat(self) -> Self:
        if self.input_channels == "single" and (self.batchnorm != "two-passes" or self.shared_dropout):
            raise FieldsDisagree(
                "batchnorm and shared_dropout say how two channels go together; leave them out with input_channels = "
                "'single'",
                "batchnorm",
                "shared_dropout",
                "input_channels",
            )
        return self

    @model_validator(mode="after")
    def _shared_offset_is_one(self) -> Self:
        if self.shared_offset and self.offset_aggregation in ("none", "network"):
            raise FieldsDisagree(
                f"shared_offset = true keeps one offset for all, offset_aggregation = '{self.offset_aggregation}' "
                "would give each client its own; use 'auto' or 'mean'",
                "offset_aggregation",
                "shared_offset",
            )
        if self.shared_offset and self.offset_init == "generator":
            raise FieldsDisagree(
                "shared_offset = true cannot start from the generator, which makes one offset per client",
                "offset_init",
                "shared_offset",
            )
        return self


class FedAvgOptions(Frozen):
    """FedAvg: a single-channel model, local SGD, the mean."""

    name: Literal["fedavg"] = "fedavg"


class PFedMeOptions(Frozen):
    """pFedMe: each client keeps a model of its own near the global one; the global one follows. No momentum, no decay.

    The rate η of the global model's local copy is `training.lr`.
    """

    name: Literal["pfedme"] = "pfedme"
    personal_lr: float = Field(0.01, ge=0, le=100, description="Rate η_p of the personal model θ_i.")
    attraction: float = Field(15.0, ge=0, le=1e6, description="λ: how strongly θ_i is drawn to the local copy w_i.")
    inner_steps: int = Field(5, ge=1, le=1000, description="K: steps of θ_i on each batch.")
    server_mix: float = Field(1.0, ge=0, le=10, description="β: the model becomes (1 − β) × old + β × mean.")
    decay: float = Field(1e-3, ge=0, le=100, description="μ: pulls θ_i to zero, as the authors' code does.")
    local_rounds: int | None = Field(
        None, ge=1, le=1_000_000, description="R: batches per round; unset: training.epochs over all images."
    )
    predict: Literal["personal", "local-copy"] = Field(
        "personal", description="Predict with θ_i, as published, or with w_i, as the authors' code really does."
    )


class HypernetworkOptions(Frozen):
    """What both forms of pFedHN have in common."""

    embedding_dim: int | None = Field(
        None, ge=1, le=4096, description="Width of a client's embedding; unset: 1 + a quarter of the first clients."
    )
    hidden: int = Field(100, ge=1, le=4096, description="Width of the hypernetwork's layers.")
    hidden_layers: int = Field(3, ge=0, le=64, description="Layers between the embedding's and the heads.")
    lr: float = Field(1e-2, ge=0, le=10, description="Rate of the hypernetwork.")
    embedding_lr: float | None = Field(None, ge=0, le=10, description="Rate of the embeddings; unset: lr.")
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of the hypernetwork's SGD.")
    weight_decay: float = Field(1e-3, ge=0, le=1, description="Weight decay of the hypernetwork's SGD.")
    clip_norm: float = Field(50.0, gt=0, description="Largest norm of the hypernetwork's gradient, and of a client's.")
    inner_steps: int | None = Field(
        None, ge=1, le=1_000_000, description="Batches per round, each of a new shuffle; unset: training.epochs."
    )
    uploads: Literal["sequential", "mean"] = Field(
        "sequential",
        description="One step per client, in the order of their names; or, for many, one with the mean gradient.",
    )


class PFedHNOptions(HypernetworkOptions):
    """pFedHN: a hypernetwork at the coordinator makes each client's whole model from an embedding of the client."""

    name: Literal["pfedhn"] = "pfedhn"


class PFedHNPCOptions(HypernetworkOptions):
    """pFedHN-PC: the hypernetwork makes all but the logits layer, which each client trains and keeps for itself."""

    name: Literal["pfedhn-pc"] = "pfedhn-pc"
    lr: float = Field(5e-2, ge=0, le=10, description="Rate of the hypernetwork.")


class MoonOptions(Frozen):
    """MOON: FedAvg with a projection head and a term that draws features to the global model's."""

    name: Literal["moon"] = "moon"
    mu: float = Field(
        1.0, ge=0, le=1000, description="μ: weight of the contrastive term; the paper has 5 for CIFAR-10."
    )
    temperature: float = Field(0.5, gt=0, le=100, description="τ of the contrastive term.")
    projection_dim: int = Field(256, ge=1, le=65536, description="Width of the projection, which the logits stand on.")
    previous_models: int = Field(1, ge=1, le=16, description="How many earlier local models features are pushed from.")
    server_momentum: float = Field(0.0, ge=0, lt=1, description="Momentum of the global model over rounds.")


class FedAwSOptions(Frozen):
    """FedAwS: clients train features towards their own classes' rows; the coordinator keeps the rows apart."""

    name: Literal["fedaws"] = "fedaws"
    client_loss: Literal["hinge", "cross-entropy"] = Field(
        "hinge",
        description="Clients draw images to their own classes' rows, all they are given to train with; or classify "
        "among all rows by cosine over temperature, and every row is averaged over all clients (FedRepo).",
    )
    margin: float = Field(
        0.9, ge=-1, le=1, description="Of the hinge: the cosine of an image and its class' row that is enough."
    )
    spread_distance: Literal["cosine", "half-cosine"] = Field(
        "cosine", description="The distance of two rows: 1 − cosine, or half of it."
    )
    spread_margin: float = Field(0.9, ge=0, le=2, description="ν: the distance of two rows that is enough.")
    spread_reduction: Literal["sum", "mean"] = Field(
        "sum", description="The spread-out loss is the sum over ordered pairs of rows, or the mean over all C² of them."
    )
    spread_momentum: float = Field(0.0, ge=0, lt=1, description="Momentum over the spread-out steps of a round.")
    spread: float = Field(10.0, ge=0, le=1e6, description="λ: weight of the spread-out step.")
    spread_lr: float | None = Field(None, ge=0, le=100, description="Rate of the spread-out step; unset: training.lr.")
    spread_steps: int = Field(1, ge=1, le=10_000, description="Spread-out steps per round.")
    nearest: int | None = Field(
        None, ge=1, le=100_000, description="Spread each row from this many nearest ones, without margin; unset: all."
    )
    evaluation_rows: bool = Field(
        True,
        description="Send all rows to the clients, for prediction only; false: they know their own classes alone. With "
        "cross-entropy they train with all of them in any case.",
    )
    temperature: float = Field(
        0.1, gt=0, le=100, description="Of the probabilities and of the cross-entropy; decisions do not depend on it."
    )

    @model_validator(mode="after")
    def _rows_cannot_be_withheld_and_trained(self) -> Self:
        if self.client_loss == "cross-entropy" and not self.evaluation_rows:
            raise FieldsDisagree(
                "evaluation_rows = false withholds other classes' rows, client_loss = 'cross-entropy' trains with all; "
                "use 'hinge'",
                "evaluation_rows",
                "client_loss",
            )
        return self


class MixupOptions(Frozen):
    """mixup on FedAvg: clients train on mixtures of two of their images."""

    name: Literal["mixup"] = "mixup"
    alpha: float = Field(1.0, ge=0, le=100, description="Shares are drawn from Beta(α, α), one a batch; 0: no mixing.")


class AdvPropOptions(Frozen):
    """AdvProp on FedAvg: half of what clients train on are adversarial images, with BatchNorm layers of their own."""

    name: Literal["advprop"] = "advprop"
    epsilon: float = Field(1.0, ge=0, le=255, description="Largest change of a pixel, in 1/255 of its range.")
    iterations: int = Field(1, ge=0, le=1000, description="Steps of the attack; 0: plain FedAvg.")
    step: float = Field(1.0, ge=0, le=255, description="Size of a step, in 1/255; at least epsilon / iterations.")
    random_start: bool = Field(True, description="Start the attack at a random point within epsilon.")
    targeted: bool = Field(False, description="Attack towards a random other class, not away from the right one.")
    auxiliary_batchnorm: Literal["averaged", "private"] = Field(
        "averaged", description="The adversarial images' BatchNorm: averaged too, or kept at each client."
    )


MethodOptions = Annotated[
    DistransOptions
    | FedAvgOptions
    | PFedMeOptions
    | PFedHNOptions
    | PFedHNPCOptions
    | MoonOptions
    | FedAwSOptions
    | MixupOptions
    | AdvPropOptions,
    Field(discriminator="name"),
]
_KINDS = get_args(get_args(MethodOptions)[0])
METHOD_NAMES: tuple[str, ...] = tuple(kind.model_fields["name"].default for kind in _KINDS)
