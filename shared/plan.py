"""The plan of a federation: its frozen settings, a TOML file for people and JSON on the API.

A plan may name a `preset`; what the plan itself says wins over the preset. This module does not import torch, so that
the command lines that only read or check a plan answer at once.
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

from shared.fault_words import NAME_PATTERN
from shared.method_options import DistransOptions, Frozen, HypernetworkOptions, MethodOptions, PFedMeOptions
from shared.near_match import did_you_mean
from shared.plan_faults import FieldsDisagree, every_fault, fault_count, fault_lines
from shared.problems import PlanError

# The smallest image side that each built-in network can take.
BUILT_IN_BACKBONES = {"lenet": 14, "alexnet": 63, "resnet18": 1, "resnet50": 1, "cnn": 16}
MAX_IMAGE_VALUES = 16 * 1024 * 1024
ROUNDS_SETTINGS_SINCE = ((1, "absent_after_s"),)  # by protocol: agents before it reject plans with this setting
MIN_ABSENT_AFTER_S = 120.0  # agents report at least once a minute: one lost report is not an absence

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
ClassName = Annotated[str, StringConstraints(min_length=1, max_length=128, strip_whitespace=True)]
ImportPath = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"model": {"activation": "none"}},
    # Offsets that move until they say what a client's data are like. They stay with their clients, since averages would
    # undo that; and at clients with one class they stay near their start, or they would end as a key for that class.
    "learned-offset": {
        "method": {
            "name": "distrans",
            "offset_optimizer": "adam",
            "offset_init": "zeros",
            "offset_bound": 0.3,
            "dh_threshold": 0.0,
        }
    },
    # What the authors' own programs of the other methods start with.
    "pfedme-official": {
        "averaging": "samples",
        "method": {"name": "pfedme", "personal_lr": 0.09, "local_rounds": 20},
        "training": {"lr": 0.005, "batch_size": 20},
        "rounds": {"count": 800},
    },
    "pfedhn-official": {
        "image": {"height": 32, "width": 32},
        "model": {"backbone": "cnn"},
        "method": {"name": "pfedhn", "inner_steps": 50},
        "training": {"lr": 5e-3, "momentum": 0.9, "weight_decay": 5e-5, "batch_size": 64},
    },
    "pfedhn-pc-official": {
        "image": {"height": 32, "width": 32},
        "model": {"backbone": "cnn"},
        "method": {"name": "pfedhn-pc", "inner_steps": 50},
        "training": {"lr": 5e-3, "momentum": 0.9, "weight_decay": 5e-5, "batch_size": 64},
    },
    "moon-official": {
        "averaging": "samples",
        "method": {"name": "moon", "mu": 5.0},
        "training": {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5, "batch_size": 64, "epochs": 10},
        "rounds": {"count": 100},
    },
    # FedRepo's form of FedAwS: a whole classifier at the clients, many spread-out steps at the coordinator.
    "fedaws-fedrepo": {
        "method": {
            "name": "fedaws",
            "client_loss": "cross-entropy",
            "spread": 1.0,
            "spread_distance": "half-cosine",
            "spread_margin": 0.8,
            "spread_reduction": "mean",
            "spread_momentum": 0.9,
            "spread_lr": 0.1,
            "spread_steps": 30,
        },
    },
    "mixup-official": {
        "method": {"name": "mixup"},
        "training": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "batch_size": 128},
    },
    "advprop-official": {
        "method": {"name": "advprop", "targeted": True},
        "training": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "batch_size": 256},
    },
}
Preset = Literal[
    "paper",
    "learned-offset",
    "pfedme-official",
    "pfedhn-official",
    "pfedhn-pc-official",
    "moon-official",
    "fedaws-fedrepo",
    "mixup-official",
    "advprop-official",
]
DEFAULT_PRESET: Preset = "learned-offset"


class ImagePlan(Frozen):
    """Shape of the images the model sees, and how their pixels in [0, 1] are normalised."""

    channels: int = Field(3, ge=1, le=64, description="1 for grey, 3 for colour; more from .npz files.")
    height: int = Field(64, ge=1, le=4096, description="Sites resize their images to this.")
    width: int = Field(64, ge=1, le=4096, description="Sites resize their images to this.")
    mean: tuple[float, ...] = Field((0.5,), description="Per channel, or one for all.")
    std: tuple[Annotated[float, Field(gt=0)], ...] = Field((0.5,), description="Per channel, or one for all.")

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        return self.channels, self.height, self.width

    @model_validator(mode="after")
    def _one_value_a_channel(self) -> Self:
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, self.channels):
                raise FieldsDisagree(
                    f"{name} has {len(values)} values for {self.channels} channels; give 1 or one each",
                    name,
                    "channels",
                )
        if self.channels * self.height * self.width > MAX_IMAGE_VALUES:
            raise FieldsDisagree(f"an image may have at most {MAX_IMAGE_VALUES} values", "height", "width", "channels")
        return self


class ModelPlan(Frozen):
    """The network, the same for every method."""

    backbone: str = Field("lenet", max_length=200, description="Built in, or 'package.module:function'.")
    activation: Literal["none", "relu"] = Field(
        "relu", description="LeNet only; the authors' code, and so the paper preset, has none."
    )
    dense_dim: int | None = Field(None, ge=1, le=65536, description="Width of the dense layer before the logits.")
    weights: Literal["random", "imagenet", "file"] = Field(
        "random", description="Initial weights: seeded, torchvision's ImageNet ones, or a file given at creation."
    )

    @field_validator("backbone")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in BUILT_IN_BACKBONES and not re.fullmatch(ImportPath, value):
            near = did_you_mean(value, BUILT_IN_BACKBONES).removeprefix(";")
            raise ValueError(
                f"unknown backbone {value[:60]!r};{near} Use one of {', '.join(BUILT_IN_BACKBONES)}, "
                "or 'package.module:function'"
            )
        return value

    @model_validator(mode="after")
    def _imagenet_exists(self) -> Self:
        if self.weights == "imagenet" and self.backbone not in ("alexnet", "resnet18", "resnet50"):
            raise FieldsDisagree(f"there are no ImageNet weights for {self.backbone}", "weights", "backbone")
        return self


class TrainingPlan(Frozen):
    """What each participant does in a round."""

    batch_size: int = Field(32, ge=1, le=65536, description="Images per optimisation step.")
    epochs: int = Field(1, ge=1, le=10000, description="Local epochs E per round.")
    lr: float = Field(5e-3, ge=0, le=100, description="Learning rate η of the model.")
    momentum: float = Field(0.0, ge=0, lt=1, description="Momentum of the model's SGD.")
    weight_decay: float = Field(0.0, ge=0, le=1, description="Weight decay of the model's SGD.")
    clip_norm: float | None = Field(None, gt=0, description="Largest norm of the model's gradient; unset: no clipping.")


class RoundsPlan(Frozen):
    """How many rounds, who takes part, and how long the coordinator waits."""

    count: int = Field(100, ge=1, le=1_000_000, description="Rounds to complete.")
    min_clients: int = Field(
        1, ge=1, le=1_000_000, description="Rounds start when this many clients have joined and are not absent."
    )
    sample_fraction: float = Field(1.0, gt=0, le=1, description="Share of the clients chosen for each round.")
    quorum: float = Field(0.66, gt=0, le=1, description="Share of the participants that is enough at the deadline.")
    deadline_s: float = Field(
        6 * 3600,
        gt=0,
        le=30 * 24 * 3600,
        description="Time for uploads, from when a quorum of the participants has connected.",
    )
    upload_idle_s: float = Field(60, gt=0, le=3600, description="Seconds without new bytes until an upload is torn.")
    upload_grace_s: float = Field(
        6 * 3600, ge=0, le=30 * 24 * 3600, description="How long past the deadline arriving uploads are waited for."
    )
    join_deadline_s: float = Field(
        7 * 24 * 3600,
        gt=0,
        le=365 * 24 * 3600,
        description="Time for min_clients to join, and in each round for a quorum of the participants to connect.",
    )
    absent_after_s: float = Field(
        30 * 60,
        ge=MIN_ABSENT_AFTER_S,
        le=365 * 24 * 3600,
        description="A client not heard from for this long is absent: not chosen for a new round, and no longer waited "
        "for in the open one once a quorum has uploaded.",
    )
    target_accuracy: float | None = Field(None, gt=0, le=1, description="End early at this pooled accuracy.")
    patience: int | None = Field(None, ge=1, description="End after this many rounds without improvement.")


class FederationPlan(Frozen):
    """The frozen settings of a federation."""

    name: Name = Field(description="Letters, digits, dot, dash and underscore; at most 64.")
    preset: Preset = Field(
        DEFAULT_PRESET,
        description="Defaults to start from: offsets that learn, the published settings, or those of another method's "
        "authors.",
    )
    classes: tuple[ClassName, ...] = Field(
        min_length=2, max_length=100_000, description="The sites' class names are matched with these."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Everything random follows from it.")
    averaging: Literal["uniform", "samples"] = Field(
        "uniform", description="Weights of the mean: equal (the paper's), or each client's number of images."
    )
    image: ImagePlan = ImagePlan()
    model: ModelPlan = ModelPlan()
    method: MethodOptions = DistransOptions()
    training: TrainingPlan = TrainingPlan()
    rounds: RoundsPlan = RoundsPlan()

    @field_validator("classes")
    @classmethod
    def _distinct(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        repeated = sorted({name for name in value if value.count(name) > 1}) if len(set(value)) < len(value) else []
        if repeated:
            raise ValueError(f"each class may stand once; repeated: {', '.join(repeated[:5])}")
        return value

    @model_validator(mode="after")
    def _training_fits_method(self) -> Self:
        if isinstance(self.method, PFedMeOptions) and (self.training.momentum or self.training.weight_decay):
            raise FieldsDisagree(
                "training: pfedme has neither momentum nor weight_decay; method.decay is its own",
                "training.momentum",
                "training.weight_decay",
                "method.name",
            )
        if isinstance(self.method, HypernetworkOptions) and self.model.weights != "random":
            raise FieldsDisagree(
                f"model.weights: {self.method.name} makes its models by a hypernetwork, which cannot start from given "
                "weights; use 'random'",
                "model.weights",
                "method.name",
            )
        return self

    @model_validator(mode="after")
    def _image_fits_backbone(self) -> Self:
        minimum = BUILT_IN_BACKBONES.get(self.model.backbone, 1)
        if min(self.image.height, self.image.width) < minimum:
            raise FieldsDisagree(
                f"model.backbone: {self.model.backbone} needs images of at least {minimum}×{minimum}, "
                f"image.height × image.width is {self.image.height}×{self.image.width}",
                "model.backbone",
                "image.height",
                "image.width",
            )
        imagenet_offset = isinstance(self.method, DistransOptions) and self.method.offset_init == "imagenet"
        if imagenet_offset and self.image.channels != 3:
            raise FieldsDisagree(
                "method.offset_init: ImageNet's statistics are for 3 channels; use 'uniform'",
                "method.offset_init",
                "image.channels",
            )
        return self

    # Stands last, so that it is around the other validators too.
    @model_validator(mode="wrap")
    @classmethod
    def _with_preset(cls, data: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, Mapping):
            return validate(data)
        completed = dict(data) if isinstance(data, _Complete) else cls._apply_preset(data)
        try:
            return validate(completed)
        except ValidationError as error:
            raise every_fault(completed, error, validate, cls) from error

    @classmethod
    def _apply_preset(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        preset = PRESETS.get(str(data.get("preset", DEFAULT_PRESET)), {})
        method = data.get("method")
        about = preset.get("method", {}).get("name", "distrans")
        if isinstance(method, Mapping) and method.get("name", about) != about:
            preset = {key: value for key, value in preset.items() if key != "method"}  # it is about another method
        merged = _merge(preset, data)
        if isinstance(merged.get("method"), Mapping):
            merged["method"] = {"name": "distrans", **merged["method"]}
        return merged


class _Complete(dict[str, Any]):
    """A plan in which its preset has been applied before."""


def _as_stored(data: Any) -> Any:
    """How rounds are run is the coordinator's business: an agent skips what a newer one has added there."""
    if not isinstance(data, Mapping):
        return data
    rounds = data.get("rounds")
    if isinstance(rounds, Mapping):
        data = {**data, "rounds": {key: value for key, value in rounds.items() if key in RoundsPlan.model_fields}}
    return _Complete(data)


# A plan that was validated when it was made. Presets may say more by now; what they say is not for this one.
StoredPlan = Annotated[FederationPlan, BeforeValidator(_as_stored)]
_STORED: TypeAdapter[FederationPlan] = TypeAdapter(StoredPlan)


def read_stored_plan(text: str | bytes) -> FederationPlan:
    """A plan that was written by `model_dump_json`; what it lacks has the plain defaults, not its preset's."""
    return _STORED.validate_json(text)


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def parse_plan(text: str) -> FederationPlan:
    """The plan in a TOML text; a PlanError names every fault at once, each with its field."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"The plan is not valid TOML: {toml_fault(error)}.") from error
    return validate_plan(data)


def toml_fault(error: ValueError | RecursionError) -> str:
    """Where the text stops being TOML, then why: `line 3, column 5: expected '=' after a key in a key/value pair`."""
    match = re.fullmatch(r"(.*) \(at (.*)\)", str(error), re.DOTALL)
    if match is None:  # not TOML's own limits, but Python's
        return (
            "it is nested too deeply" if isinstance(error, RecursionError) else "it has a number with too many digits"
        )
    reason, place = match.groups()
    return f"{place}: {reason[:1].lower()}{reason[1:]}"


def validate_plan(data: Mapping[str, Any]) -> FederationPlan:
    """The plan in plain data; a PlanError names every fault at once, each with its field."""
    try:
        return FederationPlan.model_validate(data)
    except ValidationError as error:
        count = fault_count(error.errors(include_url=False))
        heading = "The plan has " + ("a fault:" if count == 1 else f"{count:,} faults:")
        raise PlanError("\n".join([heading, *fault_lines(error)])) from error
