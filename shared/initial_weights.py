"""Fits weights from elsewhere into a model: a whole model of this project, or a torchvision backbone.

Reading files and downloading is the caller's: these functions take bytes and named tensors.
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from shared.problems import WeightsError

# Where torchvision's checkpoint has a layer that this project's models keep under another name.
_RENAMED = {"classifier.6.weight": "dense.weight", "classifier.6.bias": "dense.bias"}
_FIRST_CONVOLUTIONS = ("backbone.conv1.weight", "backbone.features.0.weight")


@dataclass(frozen=True)
class FitReport:
    """Which of the model's tensors were taken, and which kept their random start."""

    loaded: tuple[str, ...]
    kept_random: tuple[str, ...]
    ignored: tuple[str, ...]


def parse_weights(data: bytes, file_name: str) -> dict[str, Tensor]:
    """Named tensors of a .safetensors file, or of a .pth or .pt file with nothing but tensors in it."""
    try:
        if PurePath(file_name).suffix == ".safetensors":
            return safetensors.torch.load(data)
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise WeightsError(f"{file_name} is not a safetensors file: {error}.") from error
    except Exception as error:  # torch.load raises whatever its unzipper and unpickler meet
        raise WeightsError(
            f"{file_name} cannot be read as a file of tensors.",
            next_step="Save the network's state_dict with torch.save, or as safetensors.",
        ) from error
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not (isinstance(loaded, dict) and all(isinstance(value, Tensor) for value in loaded.values())):
        raise WeightsError(
            f"{file_name} holds something other than named tensors.",
            next_step="Save the network's state_dict, not the network.",
        )
    return {str(name): value for name, value in loaded.items()}


def fit_weights(model: nn.Module, source: Mapping[str, Tensor]) -> FitReport:
    """Put `source` into `model`, in place; every tensor of the backbone must be there, the head may stay random.

    A whole model of this project fits by its own names. A torchvision checkpoint fits the backbone; its first
    convolution is summed over the colours when the plan's images have one channel.
    """
    wanted = model.state_dict()
    if not wanted.keys() & source.keys():
        renamed = {_RENAMED.get(name, f"backbone.{name}"): value for name, value in source.items()}
    else:
        renamed = dict(source)
    chosen: dict[str, Tensor] = {}
    for name, target in wanted.items():
        value = renamed.get(name)
        if value is None:
            continue
        if name in _FIRST_CONVOLUTIONS and value.ndim == 4 and target.shape[1] == 1 and value.shape[1] == 3:
            value = value.sum(dim=1, keepdim=True)
        if value.shape == target.shape:
            chosen[name] = value.to(target.dtype)
        elif name.startswith("backbone."):
            raise WeightsError(
                f"The weights do not fit the backbone: {name} is {list(value.shape)}, the plan needs "
                f"{list(target.shape)}.",
                next_step="Use weights of the plan's backbone, image shape and channels.",
            )
    missing = [name for name in wanted if name.startswith("backbone.") and name not in chosen]
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]  # absent from old checkpoints
    if missing:
        raise WeightsError(
            f"The weights lack {len(missing)} tensors of the backbone, the first is {missing[0]!r}.",
            next_step="Use weights of the plan's backbone.",
        )
    model.load_state_dict(chosen, strict=False)
    return FitReport(
        loaded=tuple(chosen),
        kept_random=tuple(name for name in wanted if name not in chosen),
        ignored=tuple(name for name in renamed if name not in chosen),
    )
