"""The data sets by name: how the paper prepares each one, where to get it, and how to open it."""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torchvision.transforms.v2.functional as transforms
from pydantic import Field
from torch import Tensor

from lab.datasets.birds import open_bird200
from lab.datasets.cifar import open_cifar10, open_cifar100
from lab.datasets.clients import Shift
from lab.datasets.digits import open_digits
from lab.datasets.faces import open_bioid, open_celeba, open_orl
from lab.datasets.fashion import open_fashion_mnist
from lab.datasets.files import DatasetBroken, DatasetMissing, open_parted_folders
from lab.datasets.histology import open_ch_mnist
from lab.datasets.image_set import ImageSet, Indices, LazyImages, Part, Source
from shared.contract.frozen import Frozen
from shared.contract.plan import ImagePlan
from shared.contract.seeds import derive_seed
from shared.learning.preprocessing import IMAGENET_MEAN, IMAGENET_STD

_FOLDER = "folder:"
_CHUNK = 1024


@dataclass(frozen=True)
class Known:
    """A data set that experiments can name."""

    image: ImagePlan  # the paper's size and normalization; the data set's own if the paper does not use it
    classes: int
    open: Callable[[Path], Source | None]  # None if the folder does not contain the data set
    obtain: str


def _image(channels: int, height: int, width: int, mean: tuple[float, ...], std: tuple[float, ...]) -> ImagePlan:
    return ImagePlan(channels=channels, height=height, width=width, mean=mean, std=std)


KNOWN: dict[str, Known] = {
    "cifar10": Known(
        _image(3, 64, 64, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
        10,
        open_cifar10,
        "Download the binary version from https://www.cs.toronto.edu/~kriz/cifar.html and unpack "
        "data_batch_1.bin … data_batch_5.bin, test_batch.bin and batches.meta.txt there, or arrange images as "
        "train/CLASS/*.jpg and test/CLASS/*.jpg. The pickled Python version is not supported.",
    ),
    "cifar100": Known(
        _image(3, 32, 32, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        100,
        open_cifar100,
        "Download the binary version from https://www.cs.toronto.edu/~kriz/cifar.html and unpack train.bin, test.bin "
        "and fine_label_names.txt there, or arrange images as train/CLASS/* and test/CLASS/*. The pickled Python "
        "version is not supported.",
    ),
    "ch-mnist": Known(
        _image(3, 64, 64, IMAGENET_MEAN, IMAGENET_STD),
        8,
        open_ch_mnist,
        "Download Kather_texture_2016_image_tiles_5000.zip from https://zenodo.org/records/53169 and unpack it there: "
        "01_TUMOR/*.tif … 08_EMPTY/*.tif.",
    ),
    "celeba": Known(
        _image(3, 128, 128, (0.5,), (0.5,)),
        50,
        open_celeba,
        "Download img_align_celeba.zip and identity_CelebA.txt from https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html "
        "and put them there: img_align_celeba/000001.jpg … and identity_CelebA.txt.",
    ),
    "bird200": Known(
        _image(3, 128, 128, IMAGENET_MEAN, IMAGENET_STD),
        200,
        open_bird200,
        "Download CUB_200_2011.tgz from https://www.vision.caltech.edu/datasets/cub_200_2011/ and unpack it there: "
        "images/, images.txt, image_class_labels.txt, train_test_split.txt, classes.txt.",
    ),
    "bioid": Known(
        _image(1, 256, 256, (0.5,), (0.5,)),
        20,
        open_bioid,
        "Download BioID-FaceDatabase-V1.2.zip from https://www.bioid.com/face-database/. It does not say who is in "
        "which image: add identities.txt with lines like 'BioID_0000.pgm 1', or sort the images into one folder per "
        "person.",
    ),
    "orl-faces": Known(
        _image(1, 112, 92, (0.5,), (0.5,)),
        40,
        open_orl,
        "Download the AT&T Laboratories Cambridge (ORL) database of faces and unpack it there: s1/1.pgm … s40/10.pgm.",
    ),
    "fashion-mnist": Known(
        _image(1, 28, 28, (0.2860,), (0.3530,)),
        10,
        open_fashion_mnist,
        "Install Debian's package dataset-fashion-mnist, or download train-images-idx3-ubyte.gz, "
        "train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz and t10k-labels-idx1-ubyte.gz from "
        "https://github.com/zalandoresearch/fashion-mnist and put them there.",
    ),
    "digits": Known(_image(1, 16, 16, (0.5,), (0.5,)), 10, open_digits, "It comes with scikit-learn."),
}


class DataSettings(Frozen):
    """Which images of which data set."""

    name: str = Field(description="A known data set, or folder:PATH for any image folder.")
    classes: int | None = Field(None, ge=2, description="Use only this many classes, the first ones.")
    train_per_class: int | None = Field(None, ge=1, description="Use only this many training images per class.")
    test_per_class: int | None = Field(None, ge=1, description="Use only this many test images per class.")
    shift: Shift = Field(
        "none",
        description="How images differ between clients: rotated by 0, 90, 180 or 270 degrees in turn, or inverted at "
        "every other client.",
    )

    @property
    def title(self) -> str:
        """Display name: `cifar10`, `cifar10, rotated`."""
        return self.name if self.shift == "none" else f"{self.name}, {self.shift}"


def dataset_info(name: str) -> Known:
    """Return the data set of this name. A folder has 0 classes here; they are counted when it is opened."""
    if name.startswith(_FOLDER):
        return Known(ImagePlan(), 0, lambda _: None, "Create one folder of images per class.")
    if name not in KNOWN:
        raise DatasetMissing(f"Unknown data set {name!r}.", next_step=f"Use {', '.join(KNOWN)} or {_FOLDER}PATH.")
    return KNOWN[name]


def data_root(given: Path | None = None) -> Path:
    """Return the folder of the data sets: the given one, else DISTRANS_DATA, else `data` in the current folder."""
    return (given or Path(os.environ.get("DISTRANS_DATA") or "data")).expanduser()


@functools.lru_cache(maxsize=1)  # consecutive cells mostly use the same images
def load_image_set(settings: DataSettings, image: ImagePlan, root: Path) -> ImageSet:
    """Load images from the folder ROOT/NAME, or raise if a requested class has no training images.

    Without `settings.classes`, all classes of the data set are requested.
    """
    entry, source = dataset_info(settings.name), locate(settings.name, image, root)
    names = source.classes[: settings.classes]
    if settings.classes is not None and len(names) < settings.classes:
        raise DatasetBroken(f"{settings.name} has {len(names)} classes, not {settings.classes}.")
    if settings.classes is None and len(names) < entry.classes:
        raise DatasetBroken(
            f"{settings.name} in {root} has {len(names)} of {entry.classes} classes.",
            next_step=f"Get the rest, or use fewer (classes = N). {entry.obtain}",
        )
    empty = [name for label, name in enumerate(names) if label not in source.train.labels]
    if empty:
        raise DatasetBroken(
            f"{settings.name} has no training images of {', '.join(empty[:5])}.",
            next_step=f"Every class needs some. {entry.obtain}",
        )
    train = _load(source.train, len(names), settings.train_per_class, image, "train")
    test = _load(source.test, len(names), settings.test_per_class, image, "test")
    return ImageSet(names, image, train, test)


def locate(name: str, image: ImagePlan, root: Path) -> Source:
    """Open the data set on disk, without decoding it; a DatasetMissing says where to get it."""
    if name.startswith(_FOLDER):
        folder = root / Path(name.removeprefix(_FOLDER)).expanduser()  # an absolute path replaces the root
        if not folder.is_dir():
            raise DatasetMissing(
                f"Folder {folder} does not exist.", next_step="Create it with one folder of images per class."
            )
        if min(image.height, image.width) != max(image.height, image.width):
            raise DatasetBroken(
                "Images from folders are resized to squares.",
                next_step="Set image.height and image.width to the same value.",
            )
        return open_parted_folders(folder, image.channels, side=image.height)
    entry, folder = dataset_info(name), root / name
    source = entry.open(folder)
    if source is None:
        raise DatasetMissing(f"Data set {name} not found in {folder}.", next_step=entry.obtain)
    return source


def _load(pictures: LazyImages, classes: int, per_class: int | None, image: ImagePlan, part: str) -> Part:
    chosen: list[Indices] = []
    for label in range(classes):
        members = np.flatnonzero(pictures.labels == label)
        if per_class is not None and per_class < len(members):
            # The same for every seed: the images are part of the setting.
            generator = np.random.default_rng(derive_seed(0, "subset", part, label))
            members = generator.permutation(members)[:per_class]
        chosen.append(members)
    indices = np.sort(np.concatenate(chosen))
    images = _shrink(pictures.read(indices), image)
    if images.shape[1] not in (1, image.channels):
        raise DatasetBroken(f"The images have {images.shape[1]} channels, but image.channels is {image.channels}.")
    return Part(images, torch.from_numpy(pictures.labels[indices]))


def _shrink(images: Tensor, image: ImagePlan) -> Tensor:
    """Return the images at the network's size, rounded to bytes, if that is smaller than their own."""
    height, width = images.shape[-2:]
    if height * width <= image.height * image.width:
        return images
    pieces = [
        (transforms.resize(chunk.float(), [image.height, image.width], antialias=False)).round().to(torch.uint8)
        for chunk in images.split(_CHUNK)
    ]
    return torch.cat(pieces) if pieces else images
