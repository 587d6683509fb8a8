"""Class priors: how often each class occurs at a site or in the whole federation.

A model predicts as if classes were as frequent as in the data it was trained on. Where they are not, adding
log π_there − log π_trained to its logits corrects for the difference.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

NEVER = -1e9  # finite, because evaluations treat anything else as a diverged model


def log_prior(counts: Sequence[float] | Tensor) -> Tensor:
    """Return the log frequency of each class, each count plus one, so that unseen classes stay possible."""
    smoothed = torch.as_tensor(counts, dtype=torch.float64) + 1
    return (smoothed / smoothed.sum()).log().float()


def prior_shift(there: Sequence[float] | Tensor, trained: Sequence[float] | Tensor) -> Tensor:
    """Return what to add to the logits of a model trained with counts `trained` to predict where counts are `there`."""
    return log_prior(there) - log_prior(trained)


def exclude_unseen(counts: Sequence[float] | Tensor) -> Tensor:
    """Return what to add to the logits to rule out classes without a single image."""
    return torch.where(torch.as_tensor(counts) > 0, 0.0, NEVER)
