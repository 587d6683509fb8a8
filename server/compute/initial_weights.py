"""Initial weights: from torchvision's ImageNet checkpoints, or from the operator's file."""

from pathlib import Path
from typing import TYPE_CHECKING

from shared.contract.errors import WeightsError
from shared.contract.plan import FederationPlan

if TYPE_CHECKING:
    from torch import Tensor

MAX_FILE_BYTES = 8 * 1024**3


def load_pretrained(plan: FederationPlan, file: Path | None = None) -> "dict[str, Tensor] | None":
    """Load the weights that `plan.model.weights` asks for; return None for random ones."""
    choice = plan.model.weights
    if (choice == "file") != (file is not None):
        wanted = "needs a weights file" if file is None else "does not take a weights file"
        raise WeightsError(f"A plan with model.weights = '{choice}' {wanted}.")
    if file is not None:
        return _read(file)
    return _imagenet(plan.model.backbone) if choice == "imagenet" else None


def _read(file: Path) -> "dict[str, Tensor]":
    from shared.learning.weight_fitting import parse_weights

    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise WeightsError(f"{file} is larger than {MAX_FILE_BYTES} bytes.")
        return parse_weights(file.read_bytes(), file.name)
    except OSError as error:
        raise WeightsError(f"Cannot read {file}: {error.strerror}.") from error


def _imagenet(backbone: str) -> "dict[str, Tensor]":
    import torch.hub
    import torchvision.models  # slow to import, and most plans do not need it

    weights = torchvision.models.get_model_weights(
        backbone
    ).IMAGENET1K_V1  # the weights that `pretrained=True` used to select
    try:
        return dict(weights.get_state_dict(progress=True, check_hash=True, weights_only=True))
    except Exception as error:  # network errors, and whatever torch.load raises for a broken file
        folder = Path(torch.hub.get_dir()) / "checkpoints"
        reason = error if isinstance(error, OSError | RuntimeError) else "the file does not contain tensors"
        raise WeightsError(
            f"Cannot load the ImageNet weights of {backbone}: {reason}.",
            next_step=f"Download {weights.url} on another machine and copy it to {folder}, "
            "or use model.weights = 'random'.",
        ) from error
