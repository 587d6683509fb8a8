"""A round's training at a client whose plan compresses updates: what an update leaves out is carried into the next one.

The residual is kept with the private tensors, so it is adopted together with them once the update is acknowledged, and
a repeated round gives the same bits. It only makes sense for models that contain that update: after a rollback, or if
the round failed, it is dropped.
"""

from dataclasses import replace

import numpy as np

from shared.learning.methods.base import ClientHalf, RoundTask, TrainingContext, Update
from shared.tensors.arrays import as_arrays, as_tensors
from shared.tensors.compression import compress
from shared.tensors.names import Tensors, add_prefix, strip_prefix

_RESIDUAL, _ROUND = "residual.", "residual_round"


def train_round(half: ClientHalf, task: RoundTask, kept: Tensors, context: TrainingContext) -> tuple[Update, Tensors]:
    """Train for one round; return the update as it is uploaded, and what to keep once it is stored."""
    update, private = half.train(task, without_residual(kept), context)
    compression = half.plan.training.update_compression
    if compression == "none":
        return update, private
    trained, base, left_out = as_arrays(update.shared), as_arrays(task.shared), as_arrays(_residual(kept, task))
    sent, residual = compress(trained, base, left_out, compression)
    private = private | add_prefix(as_tensors(residual), _RESIDUAL) | as_tensors({_ROUND: np.array(task.round)})
    return replace(update, shared=as_tensors(sent)), private


def without_residual(kept: Tensors) -> Tensors:
    """Return the method's own private tensors."""
    return {name: value for name, value in kept.items() if not name.startswith(_RESIDUAL) and name != _ROUND}


def _residual(kept: Tensors, task: RoundTask) -> Tensors:
    model_round = task.round - 1 if task.model_round is None else task.model_round
    is_in_model = _ROUND in kept and int(kept[_ROUND]) <= model_round
    return strip_prefix(kept, _RESIDUAL) if is_in_model else {}
