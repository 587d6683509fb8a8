"""A federation's plan: its frozen settings, as TOML for people and JSON on the API.

A plan may name a `preset`; the plan's own settings override it.
"""

import re
import tomllib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from shared.contract.error_collection import ConflictingFields, collect_errors, count_errors, error_lines
from shared.contract.errors import PlanError
from shared.contract.frozen import Frozen
from shared.contract.method_options import (
    DistransOptions,
    FedAwSOptions,
    HypernetworkOptions,
    MethodOptions,
    PFedMeOptions,
)
from shared.contract.patterns import IMPORT_PATH_PATTERN, NAME_PATTERN
from shared.contract.presets import DEFAULT_PRESET, Preset, apply_preset
from shared.contract.suggestions import did_you_mean

# Minimum image side of each built-in network.
BUILT_IN_BACKBONES = {"lenet": 14, "alexnet": 63, "resnet18": 1, "resnet50": 1, "cnn": 16}
MAX_IMAGE_VALUES = 16 * 1024 * 1024
# Settings that agents of an older protocol version do not know, with the table they are in.
_SETTINGS_SINCE = (
    (1, "rounds", "absent_after_s"),
    (2, "model", "initialization"),
    (2, "method", "offset_dropout"),
    (2, "method", "offset_loss"),
    (3, "training", "update_compression"),
)
MIN_ABSENT_AFTER_S = 120.0  # agents report at least once a minute; one lost report must not count as absence

UpdateCompression = Literal["none", "bf16", "int8", "int4"]
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
ClassName = Annotated[str, StringConstraints(min_length=1, max_length=128, strip_whitespace=True)]


class ImagePlan(Frozen):
    """The shape of the model's input images and the normalization of their pixels, which are in [0, 1]."""

    channels: int = Field(3, ge=1, le=64, description="1 for grayscale, 3 for color; more only from .npz files.")
    height: int = Field(64, ge=1, le=4096, description="Height that sites resize their images to.")
    width: int = Field(64, ge=1, le=4096, description="Width that sites resize their images to.")
    mean: tuple[float, ...] = Field((0.5,), description="Mean per channel, or one for all channels.")
    std: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (0.5,), description="Standard deviation per channel, or one for all channels."
    )

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        return self.channels, self.height, self.width

    @model_validator(mode="after")
    def _fits_channels_and_size(self) -> Self:
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, self.channels):
                raise ConflictingFields(
                    f"{name} has {len(values)} values for {self.channels} channels; give 1 or {self.channels}",
                    name,
                    "channels",
                )
        if self.channels * self.height * self.width > MAX_IMAGE_VALUES:
            raise ConflictingFields(
                f"an image may have at most {MAX_IMAGE_VALUES} values", "height", "width", "channels"
            )
        return self


class ModelPlan(Frozen):
    """The network; the same for every method."""

    backbone: str = Field(
        "lenet", max_length=200, description="Built-in name, or 'package.module:function' for your own."
    )
    activation: Literal["none", "relu"] = Field(
        "relu", description="LeNet's activation; the authors' code, and therefore the paper preset, has none."
    )
    initialization: Literal["torch", "kaiming"] = Field(
        "torch",
        description="LeNet's random weights: torch's defaults, or Kaiming-uniform with zero biases, as in the "
        "authors' code and therefore in the paper preset.",
    )
    dense_dim: int | None = Field(
        None, ge=1, le=65536, description="Width of a dense layer before the logits. Unset: the backbone's default."
    )
    weights: Literal["random", "imagenet", "file"] = Field(
        "random",
        description="Initial weights: seeded random, torchvision's ImageNet weights, or a file passed at creation.",
    )

    @field_validator("backbone")
    @classmethod
    def _is_known_backbone(cls, value: str) -> str:
        if value not in BUILT_IN_BACKBONES and not re.fullmatch(IMPORT_PATH_PATTERN, value):
            near = did_you_mean(value, BUILT_IN_BACKBONES)
            raise ValueError(
                f"unknown backbone {value[:60]!r}{near or '.'} Use one of {', '.join(BUILT_IN_BACKBONES)}, "
                "or 'package.module:function'"
            )
        return value

    @model_validator(mode="after")
    def _imagenet_weights_exist(self) -> Self:
        if self.weights == "imagenet" and self.backbone not in ("alexnet", "resnet18", "resnet50"):
            raise ConflictingFields(f"there are no ImageNet weights for {self.backbone}", "weights", "backbone")
        return self


class TrainingPlan(Frozen):
    """Local training of each participant in a round."""

    batch_size: int = Field(32, ge=1, le=65536, description="Images per optimization step.")
    epochs: int = Field(1, ge=1, le=10000, description="Local epochs E per round.")
    lr: float = Field(5e-3, ge=0, le=100, description="Learning rate η of the model.")
    momentum: float = Field(0.0, ge=0, lt=1, description="Momentum of the model's SGD.")
    weight_decay: float = Field(0.0, ge=0, le=1, description="Weight decay of the model's SGD.")
    clip_norm: float | None = Field(None, gt=0, description="Maximum norm of the model's gradient. Unset: no clipping.")
    update_compression: UpdateCompression = Field(
        "none",
        description="How clients upload weights: in full, or as differences to the round's model in fewer bits. What "
        "rounding leaves out, a client adds to its next update.",
    )


class RoundsPlan(Frozen):
    """How many rounds to run, who takes part, and how long the coordinator waits."""

    count: int = Field(100, ge=1, le=1_000_000, description="Rounds to complete.")
    min_clients: int = Field(
        1, ge=1, le=1_000_000, description="Rounds start once this many clients have joined and are present."
    )
    sample_fraction: float = Field(1.0, gt=0, le=1, description="Fraction of the clients chosen for each round.")
    quorum: float = Field(
        0.66, gt=0, le=1, description="Fraction of the participants that must have uploaded by the deadline."
    )
    deadline_s: float = Field(
        6 * 3600,
        gt=0,
        le=30 * 24 * 3600,
        description="Seconds to upload, counted from when a quorum of the participants has connected.",
    )
    upload_idle_s: float = Field(
        60, gt=0, le=3600, description="Seconds without new bytes after which an upload counts as interrupted."
    )
    upload_grace_s: float = Field(
        6 * 3600, ge=0, le=30 * 24 * 3600, description="Seconds past the deadline to wait for uploads in progress."
    )
    join_deadline_s: float = Field(
        7 * 24 * 3600,
        gt=0,
        le=365 * 24 * 3600,
        description="Seconds for min_clients to join and, in each round, for a quorum of the participants to connect.",
    )
    absent_after_s: float = Field(
        30 * 60,
        ge=MIN_ABSENT_AFTER_S,
        le=365 * 24 * 3600,
        description="Seconds of silence after which a client counts as absent: it is not chosen for new rounds, and "
        "the open round stops waiting for it once a quorum has uploaded.",
    )
    target_accuracy: float | None = Field(None, gt=0, le=1, description="Stop early at this pooled accuracy.")
    patience: int | None = Field(None, ge=1, description="Stop after this many rounds without improvement.")


class FederationPlan(Frozen):
    """The frozen settings of a federation."""

    name: Name = Field(description="Name of the federation: at most 64 letters, digits, dots, dashes and underscores.")
    preset: Preset = Field(
        DEFAULT_PRESET,
        description="Defaults to start from: ours, the published settings, or those of other authors.",
    )
    classes: tuple[ClassName, ...] = Field(
        min_length=2, max_length=100_000, description="Class names; sites match their own class names against these."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of every random choice.")
    averaging: Literal["uniform", "samples"] = Field(
        "uniform", description="Weights of the mean: equal, as in the paper, or each client's number of images."
    )
    image: ImagePlan = ImagePlan()
    model: ModelPlan = ModelPlan()
    method: MethodOptions = DistransOptions()
    training: TrainingPlan = TrainingPlan()
    rounds: RoundsPlan = RoundsPlan()

    @field_validator("classes")
    @classmethod
    def _are_distinct(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        repeated = sorted({name for name in value if value.count(name) > 1}) if len(set(value)) < len(value) else []
        if repeated:
            raise ValueError(f"classes must be distinct; repeated: {', '.join(repeated[:5])}")
        return value

    @model_validator(mode="after")
    def _training_fits_method(self) -> Self:
        if isinstance(self.method, PFedMeOptions) and (self.training.momentum or self.training.weight_decay):
            raise ConflictingFields(
                "training: pfedme uses neither momentum nor weight_decay; set method.decay instead",
                "training.momentum",
                "training.weight_decay",
                "method.name",
            )
        if isinstance(self.method, HypernetworkOptions) and self.model.weights != "random":
            raise ConflictingFields(
                f"model.weights: {self.method.name} generates its models with a hypernetwork, which cannot start from "
                "given weights; use 'random'",
                "model.weights",
                "method.name",
            )
        if isinstance(self.method, HypernetworkOptions) and self.training.update_compression != "none":
            raise ConflictingFields(
                f"training.update_compression: {self.method.name}'s clients upload no shared weights to compress, only "
                "how their own models changed; use 'none'",
                "training.update_compression",
                "method.name",
            )
        return self

    @model_validator(mode="after")
    def _image_fits_backbone(self) -> Self:
        minimum = BUILT_IN_BACKBONES.get(self.model.backbone, 1)
        if min(self.image.height, self.image.width) < minimum:
            raise ConflictingFields(
                f"model.backbone: {self.model.backbone} needs images of at least {minimum}×{minimum}, but "
                f"image.height × image.width is {self.image.height}×{self.image.width}",
                "model.backbone",
                "image.height",
                "image.width",
            )
        imagenet_offset = isinstance(self.method, DistransOptions) and self.method.offset_init == "imagenet"
        if imagenet_offset and self.image.channels != 3:
            raise ConflictingFields(
                "method.offset_init: ImageNet's statistics are for 3 channels; use 'uniform'",
                "method.offset_init",
                "image.channels",
            )
        return self

    @property
    def counts_needed_by(self) -> str | None:
        """The setting that does not work unless all sites tell their class counts; None if they may withhold them."""
        if self.averaging == "samples":
            return "averaging = 'samples'"
        if isinstance(self.method, FedAwSOptions) and self.method.client_loss == "hinge":
            return "method.client_loss = 'hinge'"
        return None

    # Defined last so that it wraps the other validators too.
    @model_validator(mode="wrap")
    @classmethod
    def _with_preset(cls, data: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, Mapping):
            return validate(data)
        completed = dict(data) if isinstance(data, _Complete) else apply_preset(data)
        try:
            return validate(completed)
        except ValidationError as error:
            raise collect_errors(completed, error, validate, cls) from error


class _Complete(dict[str, Any]):
    """Plan data whose preset has already been applied."""


def _as_stored(data: Any) -> Any:
    """Mark plan data as complete, without settings that a newer coordinator added to `[rounds]`.

    Only the coordinator uses `[rounds]`, so agents can ignore unknown settings there.
    """
    if not isinstance(data, Mapping):
        return data
    rounds = data.get("rounds")
    if isinstance(rounds, Mapping):
        data = {**data, "rounds": {key: value for key, value in rounds.items() if key in RoundsPlan.model_fields}}
    return _Complete(data)


# A plan validated when it was created. Its preset may have changed since; the change must not affect this plan.
StoredPlan = Annotated[FederationPlan, BeforeValidator(_as_stored)]
_STORED: TypeAdapter[FederationPlan] = TypeAdapter(StoredPlan)


def read_stored_plan(text: str | bytes) -> FederationPlan:
    """Read a plan written by `model_dump_json`; missing settings get the plain defaults, not the preset's."""
    return _STORED.validate_json(text)


def settings_to_hide(plan: FederationPlan, protocol: int) -> dict[str, set[str]]:
    """Return the settings, by table, to leave out of a plan for agents of this protocol version: they reject new ones.

    Nothing is lost: `[rounds]` concerns the coordinator only, and elsewhere only settings with their default value are
    left out, which mean the same as none.
    """
    hidden: dict[str, set[str]] = {}
    for since, table, name in _SETTINGS_SINCE:
        options = getattr(plan, table)
        field = type(options).model_fields.get(name)
        if since > protocol and field and (table == "rounds" or getattr(options, name) == field.default):
            hidden.setdefault(table, set()).add(name)
    return hidden


def parse_plan(text: str) -> FederationPlan:
    """Parse a TOML plan. Raise a PlanError that lists every error with its field."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"The plan is not valid TOML: {describe_toml_error(error)}.") from error
    return validate_plan(data)


def describe_toml_error(error: ValueError | RecursionError) -> str:
    """Return where and why parsing failed: `line 3, column 5: expected '=' after a key in a key/value pair`."""
    match = re.fullmatch(r"(.*) \(at (.*)\)", str(error), re.DOTALL)
    if match is None:  # a limit of Python, not a syntax error
        return "it is nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"
    reason, place = match.groups()
    return f"{place}: {reason[:1].lower()}{reason[1:]}"


def validate_plan(data: Mapping[str, Any]) -> FederationPlan:
    """Validate a plan given as plain data. Raise a PlanError that lists every error with its field."""
    try:
        return FederationPlan.model_validate(data)
    except ValidationError as error:
        count = count_errors(error.errors(include_url=False))
        heading = "The plan has " + ("an error:" if count == 1 else f"{count:,} errors:")
        raise PlanError("\n".join([heading, *error_lines(error)])) from error
