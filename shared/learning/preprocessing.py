"""Image preprocessing that sites, offsets and experiments have in common."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def normalize(pixels: "Tensor", mean: tuple[float, ...], std: tuple[float, ...]) -> "Tensor":
    """(…, C, H, W) in [0, 1] → (pixels − mean) / std, per channel."""
    import torch

    return (pixels - torch.tensor(mean).reshape(-1, 1, 1)) / torch.tensor(std).reshape(-1, 1, 1)
