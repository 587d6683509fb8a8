"""What server halves compute from models, in numpy, with the bits that torch would give."""

import numpy as np

from shared.tensors.arrays import Array


def scaled(values: Array, factor: float) -> Array:
    """Return values × factor, computed in float32 for half precision and in the values' own dtype otherwise."""
    if values.dtype.itemsize != 2:
        return np.asarray(values * values.dtype.type(factor))
    return np.asarray(values.astype(np.float32) * np.float32(factor)).astype(values.dtype)
