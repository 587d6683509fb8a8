"""What identifies a model at a site."""

from typing import NamedTuple


class ModelKey(NamedTuple):
    """The identity of a model with this site's tensors.

    The number is not enough: a coordinator restored from a backup reuses numbers. Neither is the digest of the
    weights: with different personal or private tensors the same weights give different answers.
    """

    number: int
    digest: str
    fingerprint: str  # see Bundle.fingerprint; empty if an older agent stored the model
