"""The settings of each method: a plan's `[method]` table. Names follow the papers."""

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from shared.contract.error_collection import ConflictingFields
from shared.contract.frozen import Frozen

OffsetOptimizer = Literal["sgd", "adam", "sign-sgd"]
ChannelBatchNorm = Literal["two-passes", "joint", "separate"]
InputChannels = Literal["double", "single"]

# The paper's rate (sgd) moves the offset by about one part in a million per epoch; the others move it visibly.
DEFAULT_OFFSET_LR: dict[OffsetOptimizer, float] = {"sgd": 1e-3, "adam": 0.05, "sign-sgd": 0.02}


class GeneratorOptions(Frozen):
    """The offset aggregation network and its training at the coordinator."""

    inputs: Literal["embedding", "embedding+offset"] = Field(
        "embedding", description="The network's input: the client's class embedding, optionally with its last offset."
    )
    hidden: int = Field(100, ge=1, le=4096, description="Width of the fully connected layers.")
    width: int = Field(512, ge=8, le=4096, description="Channels after the first transposed convolution.")
    optimizer: Literal["sgd", "adam"] = Field("sgd", description="Optimizer of the network.")
    lr: float = Field(1e-2, ge=0, le=10, description="Learning rate of the network.")
    steps: int = Field(1, ge=1, le=1000, description="Training steps per client and round.")
    reduction: Literal["mean", "sum"] = Field(
        "mean", description="Whether the squared error is averaged or summed over pixels."
    )
    mix: float = Field(
        1.0, ge=0, le=1, description="Clients receive mix × network output + (1 − mix) × their own offset."
    )


class DistransOptions(Frozen):
    """DisTrans: a double-input-channel model with one offset per client."""

    name: Literal["distrans"] = "distrans"
    alpha: float = Field(0.3, ge=0, le=1, description="Blending factor α of Eq. 1.")
    input_channels: InputChannels = Field(
        "double", description="Both channels of Eq. 1, or only (1 − α) x + α t with a single-channel head (ablation)."
    )
    update_rule: Literal["alternating", "joint"] = Field(
        "alternating",
        description="Offset first, then the model at the new offset (Algorithm 1); or both from one backward pass.",
    )
    offset_optimizer: OffsetOptimizer = Field("sgd", description="Optimizer of the offset; reset every round.")
    offset_lr: float | None = Field(
        None,
        ge=0,
        le=100,
        description="Learning rate of the offset; 0 freezes it. Unset: 1e-3 (sgd), 0.05 (adam), 0.02 (sign-sgd).",
    )
    offset_bound: float | None = Field(
        None,
        gt=0,
        le=100,
        description="How far each offset value may move from its initial value or, once offsets have been aggregated, "
        "from the value last received. Unset: no limit.",
    )
    bounded_clients: Literal["single-class", "all", "none"] = Field(
        "single-class",
        description="Whose offsets are bounded. At a client with a single class, an unbounded offset becomes a key for "
        "that class.",
    )
    offset_dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of the model's steps that see the image without the offset (α = 0), so that the model also "
        "works without it.",
    )
    offset_loss: Literal["plain", "prior"] = Field(
        "plain",
        description="What the offset learns from: the plain loss, or the loss with logits adjusted by the client's "
        "class frequencies, so that it describes images rather than frequencies.",
    )
    offset_gradient: Literal["mean", "sum"] = Field(
        "mean", description="Whether the offset's gradient is averaged or summed over a batch."
    )
    offset_init: Literal["auto", "uniform", "imagenet", "normal", "zeros", "generator"] = Field(
        "auto",
        description="Initial offset: U[0,1) pixels normalized with the plan's statistics (uniform) or ImageNet's; "
        "N(0,1); zeros; or the output of the untrained aggregation network (generator). auto: generator while offsets "
        "are aggregated by the network, otherwise uniform.",
    )
    shared_offset: bool = Field(False, description="Control experiment: all clients use the same offset.")
    offset_aggregation: Literal["auto", "none", "mean", "network"] = Field(
        "auto", description="How offsets are aggregated. auto: network while DH < dh_threshold, otherwise none."
    )
    dh_threshold: float = Field(0.5, ge=0, le=1, description="DH threshold for auto.")
    offset_backup: bool = Field(
        False,
        description="Keep a copy of each client's offset at the coordinator even without aggregation, for agents that "
        "lose their state.",
    )
    batchnorm: ChannelBatchNorm = Field(
        "two-passes",
        description="BatchNorm during training: one pass per channel with common running statistics; one joint batch "
        "of both channels; or separate layers per channel.",
    )
    batchnorm_statistics: Literal["averaged", "private"] = Field(
        "averaged",
        description="Whether BatchNorm's running statistics are averaged like weights or stay at each client.",
    )
    shared_dropout: bool = Field(False, description="Drop the same features in both channels.")
    generator: GeneratorOptions = GeneratorOptions()

    @property
    def effective_offset_lr(self) -> float:
        """The offset's learning rate: the plan's, or else the optimizer's default."""
        return DEFAULT_OFFSET_LR[self.offset_optimizer] if self.offset_lr is None else self.offset_lr

    @model_validator(mode="after")
    def _channel_settings_need_two_channels(self) -> Self:
        if self.input_channels == "single" and (self.batchnorm != "two-passes" or self.shared_dropout):
            raise ConflictingFields(
                "batchnorm and shared_dropout apply to two channels; remove them or set input_channels = 'double'",
                "batchnorm",
                "shared_dropout",
                "input_channels",
            )
        return self

    @model_validator(mode="after")
    def _separate_steps_need_the_alternating_rule(self) -> Self:
        if self.update_rule == "joint" and (self.offset_dropout or self.offset_loss == "prior"):
            raise ConflictingFields(
                "offset_dropout and offset_loss = 'prior' need a step of their own for the offset; use "
                "update_rule = 'alternating'",
                "update_rule",
                "offset_dropout",
                "offset_loss",
            )
        return self

    @model_validator(mode="after")
    def _shared_offset_stays_shared(self) -> Self:
        if self.shared_offset and self.offset_aggregation in ("none", "network"):
            raise ConflictingFields(
                f"shared_offset = true needs one offset for all clients, but offset_aggregation = "
                f"'{self.offset_aggregation}' gives each its own; use 'auto' or 'mean'",
                "offset_aggregation",
                "shared_offset",
            )
        if self.shared_offset and self.offset_init == "generator":
            raise ConflictingFields(
                "shared_offset = true cannot start from the generator, which creates one offset per client",
                "offset_init",
                "shared_offset",
            )
        return self


class FedAvgOptions(Frozen):
    """FedAvg: a single-channel model, local SGD, averaging."""

    name: Literal["fedavg"] = "fedavg"


class PFedMeOptions(Frozen):
    """pFedMe: each client keeps a personal model near its copy of the global one, whose rate η is `training.lr`."""

    name: Literal["pfedme"] = "pfedme"
    personal_lr: float = Field(0.01, ge=0, le=100, description="Learning rate η_p of the personal model θ_i.")
    attraction: float = Field(
        15.0, ge=0, le=1e6, description="λ: how strongly θ_i is pulled toward the local copy w_i."
    )
    inner_steps: int = Field(5, ge=1, le=1000, description="K: steps of θ_i per batch.")
    server_mix: float = Field(1.0, ge=0, le=10, description="β: the new global model is (1 − β) × old + β × mean.")
    decay: float = Field(1e-3, ge=0, le=100, description="μ: weight decay of θ_i, as in the authors' code.")
    local_rounds: int | None = Field(
        None, ge=1, le=1_000_000, description="R: batches per round. Unset: training.epochs passes over all images."
    )
    predict: Literal["personal", "local-copy"] = Field(
        "personal", description="Predict with θ_i, as published, or with w_i, as the authors' code does."
    )


class HypernetworkOptions(Frozen):
    """The settings shared by pFedHN and pFedHN-PC."""

    embedding_dim: int | None = Field(
        None, ge=1, le=4096, description="Width of a client's embedding. Unset: 1 + a quarter of the initial clients."
    )
    hidden: int = Field(100, ge=1, le=4096, description="Width of the hypernetwork's hidden layers.")
    hidden_layers: int = Field(3, ge=0, le=64, description="Hidden layers between the first layer and the heads.")
    lr: float = Field(1e-2, ge=0, le=10, description="Learning rate of the hypernetwork.")
    embedding_lr: float | None = Field(None, ge=0, le=10, description="Learning rate of the embeddings. Unset: lr.")
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of the hypernetwork's SGD.")
    weight_decay: float = Field(1e-3, ge=0, le=1, description="Weight decay of the hypernetwork's SGD.")
    clip_norm: float = Field(50.0, gt=0, description="Maximum norm of the hypernetwork's gradient and of a client's.")
    inner_steps: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="Batches per round, each from a new shuffle. Unset: training.epochs passes.",
    )
    uploads: Literal["sequential", "mean"] = Field(
        "sequential",
        description="One step per client in id order, or one step with the mean gradient (for many clients).",
    )


class PFedHNOptions(HypernetworkOptions):
    """pFedHN: a hypernetwork at the coordinator generates each client's entire model from the client's embedding."""

    name: Literal["pfedhn"] = "pfedhn"


class PFedHNPCOptions(HypernetworkOptions):
    """pFedHN-PC: the hypernetwork generates everything but the logits layer, which each client trains and keeps."""

    name: Literal["pfedhn-pc"] = "pfedhn-pc"
    lr: float = Field(5e-2, ge=0, le=10, description="Learning rate of the hypernetwork.")


class MoonOptions(Frozen):
    """MOON: FedAvg with a projection head and a contrastive term that pulls features toward the global model's."""

    name: Literal["moon"] = "moon"
    mu: float = Field(
        1.0, ge=0, le=1000, description="μ: weight of the contrastive term; the paper uses 5 for CIFAR-10."
    )
    temperature: float = Field(0.5, gt=0, le=100, description="τ of the contrastive term.")
    projection_dim: int = Field(256, ge=1, le=65536, description="Width of the projection that feeds the logits.")
    previous_models: int = Field(
        1, ge=1, le=16, description="Number of earlier local models to push features away from."
    )
    server_momentum: float = Field(0.0, ge=0, lt=1, description="Momentum of the global model across rounds.")


class FedAwSOptions(Frozen):
    """FedAwS: clients pull features toward their own classes' rows; the coordinator spreads the rows apart."""

    name: Literal["fedaws"] = "fedaws"
    client_loss: Literal["hinge", "cross-entropy"] = Field(
        "hinge",
        description="hinge: clients receive only their own classes' rows and pull images toward them. cross-entropy: "
        "clients classify among all rows by cosine / temperature, and all rows are averaged over all clients "
        "(FedRepo).",
    )
    margin: float = Field(
        0.9,
        ge=-1,
        le=1,
        description="Hinge margin: the cosine between an image and its class's row beyond which the loss is zero.",
    )
    spread_distance: Literal["cosine", "half-cosine"] = Field(
        "cosine", description="Distance between two rows: 1 − cosine, or half of it."
    )
    spread_margin: float = Field(
        0.9, ge=0, le=2, description="ν: the distance beyond which two rows are far enough apart."
    )
    spread_reduction: Literal["sum", "mean"] = Field(
        "sum",
        description="Whether the spread-out loss is the sum over ordered pairs of rows or the mean over all C² pairs.",
    )
    spread_momentum: float = Field(0.0, ge=0, lt=1, description="Momentum across the spread-out steps of a round.")
    spread: float = Field(10.0, ge=0, le=1e6, description="λ: weight of the spread-out step.")
    spread_lr: float | None = Field(
        None, ge=0, le=100, description="Learning rate of the spread-out step. Unset: training.lr."
    )
    spread_steps: int = Field(1, ge=1, le=10_000, description="Spread-out steps per round.")
    nearest: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="Spread each row from this many nearest rows, without a margin. Unset: from all rows.",
    )
    evaluation_rows: bool = Field(
        True,
        description="Send all rows to the clients for prediction; false: clients only know their own classes' rows. "
        "With cross-entropy, clients always receive all rows.",
    )
    temperature: float = Field(
        0.1,
        gt=0,
        le=100,
        description="Temperature of probabilities and cross-entropy; does not affect which class is predicted.",
    )

    @model_validator(mode="after")
    def _cross_entropy_needs_all_rows(self) -> Self:
        if self.client_loss == "cross-entropy" and not self.evaluation_rows:
            raise ConflictingFields(
                "evaluation_rows = false hides the rows of other classes, which client_loss = 'cross-entropy' needs; "
                "use 'hinge'",
                "evaluation_rows",
                "client_loss",
            )
        return self


class MixupOptions(Frozen):
    """mixup on FedAvg: clients train on mixtures of pairs of images."""

    name: Literal["mixup"] = "mixup"
    alpha: float = Field(
        1.0, ge=0, le=100, description="Mixing ratios are drawn from Beta(α, α), one per batch; 0: no mixing."
    )


class AdvPropOptions(Frozen):
    """AdvProp on FedAvg: half of the training images are adversarial and use separate BatchNorm layers."""

    name: Literal["advprop"] = "advprop"
    epsilon: float = Field(1.0, ge=0, le=255, description="Maximum change per pixel, in 1/255 of the pixel range.")
    iterations: int = Field(1, ge=0, le=1000, description="Attack steps; 0: plain FedAvg.")
    step: float = Field(1.0, ge=0, le=255, description="Step size in 1/255; raised to epsilon / iterations if smaller.")
    random_start: bool = Field(True, description="Start the attack at a random point within epsilon.")
    targeted: bool = Field(
        False, description="Attack toward a random other class instead of away from the correct one."
    )
    auxiliary_batchnorm: Literal["averaged", "private"] = Field(
        "averaged",
        description="Whether the adversarial images' BatchNorm layers are averaged too or stay at each client.",
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
METHOD_NAMES: tuple[str, ...] = tuple(
    options.model_fields["name"].default for options in get_args(get_args(MethodOptions)[0])
)
