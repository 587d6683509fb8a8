"""Sets of images for experiments, read from their published layouts, and cut into simulated clients."""

from lab.datasets.clients import make_clients, make_indexed_clients
from lab.datasets.digits import DIGIT_CLASSES, load_digits
from lab.datasets.image_set import ImageSet, IndexedData
from lab.datasets.registry import KNOWN, DataSettings, data_root, open_set

__all__ = [
    "DIGIT_CLASSES",
    "KNOWN",
    "DataSettings",
    "ImageSet",
    "IndexedData",
    "data_root",
    "load_digits",
    "make_clients",
    "make_indexed_clients",
    "open_set",
]
