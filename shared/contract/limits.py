"""Limits that both sides enforce to keep sums over any number of clients exact; see shared/tensors/exact_sum.py."""

MAX_WEIGHT = 2**28  # larger weights would need more limbs
MAX_ABSOLUTE = 2.0**900  # beyond it, the exact sum would leave float64's range
MAX_INTEGER = 2**40
# Limits on what a client reports; sums over any number of clients stay well within floats and database columns.
MAX_IMAGES = MAX_WEIGHT
MAX_LOSS = 1e6  # cross-entropy per image; beyond it the model has diverged
