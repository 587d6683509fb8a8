"""The sets by name: how the paper prepares each, where it comes from, and how it is opened."""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import Field

from lab.datasets.birds import open_bird200
from lab.datasets.cifar import open_cifar10, open_cifar100
from lab.datasets.digits import open_digits
from lab.datasets.faces import open_bioid, open_celeba, open_orl
from lab.datasets.fashion import open_fashion_mnist
from lab.datasets.files import DatasetBroken, DatasetMissing, open_parted_folders
from lab.datasets.histology import open_ch_mnist
from lab.datasets.image_set import ImageSet, Indices, Part, Pictures, Shift, Source, shrink
from shared.method_options import Frozen
from shared.plan import ImagePlan
from shared.seeds import derive_seed

_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
_FOLDER = "folder:"


@dataclass(frozen=True)
class Known:
    """A set that can be asked for by name."""

    image: ImagePlan  # the paper's size and normalisation, or for sets it does not have, their own
    classes: int
    open: Callable[[Path], Source | None]  # None where the folder does not hold the set
    obtain: str


def _image(channels: int, height: int, width: int, mean: tuple[float, ...], std: tuple[float, ...]) -> ImagePlan:
    return ImagePlan(channels=channels, height=height, width=width, mean=mean, std=std)


KNOWN: dict[str, Known] = {
    "cifar10": Known(
        _image(3, 64, 64, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        10,
        open_cifar10,
        "Download the binary version from https://www.cs.toronto.edu/~kriz/cifar.html and unpack "
        "data_batch_1.bin … data_batch_5.bin, test_batch.bin and batches.meta.txt there, or lay out images as "
        "train/CLASS/*.jpg and test/CLASS/*.jpg. The Python version is pickled and is not read.",
    ),
    "cifar100": Known(
        _image(3, 32, 32, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        100,
        open_cifar100,
        "Download the binary version from https://www.cs.toronto.edu/~kriz/cifar.html and unpack train.bin, test.bin "
        "and fine_label_names.txt there, or lay out images as train/CLASS/* and test/CLASS/*. The Python version is "
        "pickled and is not read.",
    ),
    "ch-mnist": Known(
        ImagePlan(channels=3, height=64, width=64, **_IMAGENET),
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
        ImagePlan(channels=3, height=128, width=128, **_IMAGENET),
        200,
        open_bird200,
        "Download CUB_200_2011.tgz from https://www.vision.caltech.edu/datasets/cub_200_2011/ and unpack it there: "
        "images/, images.txt, image_class_labels.txt, train_test_split.txt, classes.txt.",
    ),
    "bioid": Known(
        _image(1, 256, 256, (0.5,), (0.5,)),
        20,
        open_bioid,
        "Download BioID-FaceDatabase-V1.2.zip from https://www.bioid.com/face-database/. It does not say who is on "
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
    """Which images of which set."""

    name: str = Field(description="One of the known sets, or folder:PATH for any image folder.")
    classes: int | None = Field(None, ge=2, description="Only the first so many classes.")
    train_per_class: int | None = Field(None, ge=1, description="Only so many training images of each class.")
    test_per_class: int | None = Field(None, ge=1, description="Only so many test images of each class.")
    shift: Shift = Field(
        "none",
        description="How images differ between clients: turned by 0, 90, 180 or 270 degrees in turn, or the negatives "
        "of the images at every other client.",
    )

    @property
    def title(self) -> str:
        """For people: `cifar10`, `cifar10, rotated`."""
        return self.name if self.shift == "none" else f"{self.name}, {self.shift}"


def known(name: str) -> Known:
    """The set of this name; a folder's classes are counted when it is opened, here they are 0."""
    if name.startswith(_FOLDER):
        return Known(ImagePlan(), 0, lambda _: None, "Lay out one folder of images per class.")
    if name not in KNOWN:
        raise DatasetMissing(
            f"There is no data set named {name!r}.", next_step=f"Use {', '.join(KNOWN)} or {_FOLDER}PATH."
        )
    return KNOWN[name]


def data_root(given: Path | None = None) -> Path:
    """Where sets are looked for: the given folder, else DISTRANS_DATA, else `data` in the current folder."""
    return (given or Path(os.environ.get("DISTRANS_DATA") or "data")).expanduser()


@functools.lru_cache(maxsize=1)  # cells that run after one another mostly use the same set
def open_set(settings: DataSettings, image: ImagePlan, root: Path) -> ImageSet:
    """The images in memory, decoded once; sets stand in folders of their names under the root.

    All classes that were asked for are there, unasked those of the whole set, and each has training images.
    """
    entry, source = known(settings.name), locate(settings.name, image, root)
    names = source.classes[: settings.classes]
    if settings.classes is not None and len(names) < settings.classes:
        raise DatasetBroken(f"{settings.name} has {len(names)} classes, {settings.classes} were asked for.")
    if settings.classes is None and len(names) < entry.classes:
        raise DatasetBroken(
            f"{settings.name} under {root} has {len(names)} classes; there should be {entry.classes}.",
            next_step=f"Get the rest, or ask for fewer (classes = N). {entry.obtain}",
        )
    empty = [name for label, name in enumerate(names) if label not in source.train.labels]
    if empty:
        raise DatasetBroken(
            f"{settings.name} has no training images of {', '.join(empty[:5])}.",
            next_step=f"Each class needs some. {entry.obtain}",
        )
    train = _load(source.train, len(names), settings.train_per_class, image, "train")
    test = _load(source.test, len(names), settings.test_per_class, image, "test")
    return ImageSet(names, image, train, test)


def locate(name: str, image: ImagePlan, root: Path) -> Source:
    """The set as it lies on the disk; a DatasetMissing says where to get it."""
    if name.startswith(_FOLDER):
        folder = root / Path(name.removeprefix(_FOLDER)).expanduser()  # an absolute path stays what it is
        if not folder.is_dir():
            raise DatasetMissing(f"There is no folder {folder}.", next_step="Lay out one folder per class in it.")
        if min(image.height, image.width) != max(image.height, image.width):
            raise DatasetBroken("Images of a folder are resized to squares.", next_step="Set image.height = width.")
        return open_parted_folders(folder, image.channels, side=image.height)
    entry, folder = known(name), root / name
    source = entry.open(folder)
    if source is None:
        raise DatasetMissing(f"The data set {name} is not in {folder}.", next_step=entry.obtain)
    return source


def _load(pictures: Pictures, classes: int, per_class: int | None, image: ImagePlan, part: str) -> Part:
    chosen: list[Indices] = []
    for label in range(classes):
        members = np.flatnonzero(pictures.labels == label)
        if per_class is not None and per_class < len(members):
            # Always the same ones: the images are part of the setting, the seeds vary what is done with them.
            generator = np.random.default_rng(derive_seed(0, "subset", part, label))
            members = generator.permutation(members)[:per_class]
        chosen.append(members)
    indices = np.sort(np.concatenate(chosen))
    images = shrink(pictures.read(indices), image)
    if images.shape[1] not in (1, image.channels):
        raise DatasetBroken(f"The images have {images.shape[1]} channels, image.channels is {image.channels}.")
    return Part(images, torch.from_numpy(pictures.labels[indices]))
