"""Initial weights from outside: a complete DisTrans model or a torchvision backbone.

These functions take bytes and named tensors; the caller reads or downloads files.
"""

import io
from collections.abc import Mapping
from pathlib import PurePath

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from shared.contract.errors import WeightsError
from shared.tensors.names import Tensors

# Layers of torchvision checkpoints that have another name in DisTrans models.
_RENAMED = {"classifier.6.weight": "dense.weight", "classifier.6.bias": "dense.bias"}
_FIRST_CONVOLUTIONS = ("backbone.conv1.weight", "backbone.features.0.weight")


def parse_weights(data: bytes, file_name: str) -> Tensors:
    """Parse a .safetensors file, or a .pth or .pt file that contains only tensors, without running code."""
    try:
        if PurePath(file_name).suffix == ".safetensors":
            return safetensors.torch.load(data)
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise WeightsError(f"{file_name} is not a safetensors file: {error}.") from error
    except Exception as error:  # torch.load raises whatever its unzipper and unpickler encounter
        raise WeightsError(
            f"{file_name} cannot be read as a file of tensors.",
            next_step="Save the network's state_dict with torch.save, or as safetensors.",
        ) from error
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not (isinstance(loaded, dict) and all(isinstance(value, Tensor) for value in loaded.values())):
        raise WeightsError(
            f"{file_name} contains something other than named tensors.",
            next_step="Save the network's state_dict, not the network itself.",
        )
    return {str(name): value for name, value in loaded.items()}


def fit_weights(model: nn.Module, source: Mapping[str, Tensor]) -> None:
    """Load `source` into `model`. It must have every tensor of the backbone; other layers may stay random.

    A DisTrans model is matched by name. A torchvision checkpoint is loaded into the backbone; for grayscale images its
    first convolution is summed over the colors.
    """
    wanted = model.state_dict()
    if not wanted.keys() & source.keys():
        renamed = {_RENAMED.get(name, f"backbone.{name}"): value for name, value in source.items()}
    else:
        renamed = dict(source)
    chosen: Tensors = {}
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
                f"The weights do not fit the backbone: {name} is {list(value.shape)}, but the plan needs "
                f"{list(target.shape)}.",
                next_step="Use weights for the plan's backbone, image shape and channels.",
            )
    missing = [name for name in wanted if name.startswith("backbone.") and name not in chosen]
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]  # absent from old checkpoints
    if missing:
        raise WeightsError(
            f"The weights lack {len(missing)} tensors of the backbone, starting with {missing[0]!r}.",
            next_step="Use weights for the plan's backbone.",
        )
    model.load_state_dict(chosen, strict=False)
