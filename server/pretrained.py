"""Where initial weights come from: torchvision's ImageNet checkpoints, or a file that the operator names."""

from pathlib import Path
from typing import TYPE_CHECKING

from shared.plan import FederationPlan
from shared.problems import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

_MAX_FILE_BYTES = 8 * 1024**3


def load_pretrained(plan: FederationPlan, file: Path | None = None) -> "dict[str, Tensor] | None":
    """The weights that `plan.model.weights` asks for, or None for random ones."""
    choice = plan.model.weights
    if (choice == "file") != (file is not None):
        wanted = "needs a file of weights" if file is None else f"takes its weights from {choice}, not from a file"
        raise WeightsError(f"The plan has model.weights = '{choice}': it {wanted}.")
    if file is not None:
        return _read(file)
    return _imagenet(plan.model.backbone) if choice == "imagenet" else None


def _read(file: Path) -> "dict[str, Tensor]":
    from shared.initial_weights import parse_weights

    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise WeightsError(f"{file} is larger than {_MAX_FILE_BYTES} bytes.")
        return parse_weights(file.read_bytes(), file.name)
    except OSError as error:
        raise WeightsError(f"{file} cannot be read: {error.strerror}.") from error


def _imagenet(backbone: str) -> "dict[str, Tensor]":
    import torch.hub
    import torchvision.models  # takes long, and most plans do not need it

    weights = torchvision.models.get_model_weights(backbone).IMAGENET1K_V1  # the set that `pretrained=True` meant
    try:
        return dict(weights.get_state_dict(progress=True, check_hash=True, weights_only=True))
    except Exception as error:  # the network's errors, and whatever torch.load meets in a broken file
        folder = Path(torch.hub.get_dir()) / "checkpoints"
        reason = error if isinstance(error, OSError | RuntimeError) else "the file is not one of tensors"
        raise WeightsError(
            f"The ImageNet weights of {backbone} could not be loaded: {reason}.",
            next_step=f"Fetch {weights.url} on another machine and put it into {folder}, "
            "or use model.weights = 'random'.",
        ) from error
