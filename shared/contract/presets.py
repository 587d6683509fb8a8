"""Presets: named sets of defaults for plans. A plan's own settings override its preset."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

_LEARNED_OFFSET: dict[str, Any] = {
    "name": "distrans",
    "offset_optimizer": "adam",
    "offset_init": "zeros",
    "offset_bound": 0.3,
    "dh_threshold": 0.0,
}

PRESETS: dict[str, dict[str, Any]] = {
    # Learned offsets that describe images only: half of the model's steps do without the offset, so that the model
    # keeps what all clients have in common, and the prior tells the offset's loss which classes a client has. The rate
    # is the highest that trained LeNet on every data set tried; clipping keeps deeper networks from diverging at it.
    "offset-dropout": {
        "method": {**_LEARNED_OFFSET, "offset_dropout": 0.5, "offset_loss": "prior"},
        "training": {"lr": 0.05, "epochs": 2, "clip_norm": 2.5},
    },
    "paper": {"model": {"activation": "none", "initialization": "kaiming"}},
    # Offsets that learn how a client's data differ. They are not aggregated, because averaging would undo that, and
    # they are bounded at clients with a single class, where they would otherwise become a key for that class.
    "learned-offset": {"method": _LEARNED_OFFSET},
    # The defaults of the authors' own code for the other methods.
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
    # FedAwS as in FedRepo: a full classifier at the clients, many spread-out steps at the coordinator.
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
    "offset-dropout",
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
DEFAULT_PRESET: Preset = "offset-dropout"


def apply_preset(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan data completed with its preset; a preset for another method contributes no `method` table."""
    preset = PRESETS.get(str(data.get("preset", DEFAULT_PRESET)), {})
    method = data.get("method")
    preset_method = preset.get("method", {}).get("name", "distrans")
    if isinstance(method, Mapping) and method.get("name", preset_method) != preset_method:
        preset = {key: value for key, value in preset.items() if key != "method"}
    merged = merge(preset, data)
    if isinstance(merged.get("method"), Mapping):
        merged["method"] = {"name": "distrans", **merged["method"]}
    return merged


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the entries of `over` merged into it, table by table."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def flatten(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting of nested tables with its dotted key, such as `model.backbone`."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
