"""The settings of each method, as they stand in a plan's `[method]` table. The names follow the paper."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.plan_faults import FieldsDisagree


class Frozen(BaseModel):
    """Base of all plan tables: unknown keys are errors, values never change, numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


OffsetOptimizer = Literal["sgd", "adam", "sign-sgd"]

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
    update_rule: Literal["alternating", "joint"] = Field(
        "alternating",
        description="Algorithm 1: the offset first, then the model at the new offset; or both from one backward pass.",
    )
    offset_optimizer: OffsetOptimizer = Field("sgd", description="Optimiser of the offset; made anew each round.")
    offset_lr: float | None = Field(
        None, ge=0, le=100, description="Its rate; unset: 1e-3 (sgd), 0.05 (adam), 0.02 (sign-sgd). 0 freezes offsets."
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
    generator: GeneratorOptions = GeneratorOptions()

    @property
    def effective_offset_lr(self) -> float:
        """The offset's learning rate, with the optimiser's default where the plan names none."""
        return DEFAULT_OFFSET_LR[self.offset_optimizer] if self.offset_lr is None else self.offset_lr

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


MethodOptions = Annotated[DistransOptions | FedAvgOptions, Field(discriminator="name")]
