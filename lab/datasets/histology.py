"""CH-MNIST: the 5,000 histology tiles of Kather et al. 2016."""

from pathlib import Path

from lab.datasets.files import class_folders, hold_out, image_files, open_class_folders
from lab.datasets.image_set import Source

_PUBLISHED = "Kather_texture_2016_image_tiles_5000"


def open_ch_mnist(root: Path) -> Source | None:
    """Open 01_TUMOR … 08_EMPTY with tiles of 150×150; some archives nest the published folder in itself."""
    for folder in (root, root / _PUBLISHED, root / _PUBLISHED / _PUBLISHED):
        tissues = [entry for entry in class_folders(folder) if entry.name[:2].isdigit()] if folder.is_dir() else []
        if len(tissues) > 1 and image_files(tissues[0]):
            return hold_out(tuple(entry.name for entry in tissues), open_class_folders(tissues, channels=3))
    return None
