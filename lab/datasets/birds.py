"""Caltech-UCSD Birds-200-2011; the paper calls it Bird-200."""

from pathlib import Path

from lab.datasets.files import DatasetBroken, first_existing, pictures_of_files, read_lines
from lab.datasets.image_set import LazyImages, Source

SIDE = 128


def open_bird200(root: Path) -> Source | None:
    """Open images.txt, image_class_labels.txt, train_test_split.txt and classes.txt, with the published test part."""
    folder = first_existing([root, root / "CUB_200_2011"], "images.txt")
    if folder is None:
        return None
    names = _table(folder / "classes.txt")
    files, labels = _table(folder / "images.txt"), _table(folder / "image_class_labels.txt")
    training = _table(folder / "train_test_split.txt")
    if not files.keys() == labels.keys() == training.keys():
        raise DatasetBroken(f"The lists in {folder} name different images.")
    places = {number: place for place, number in enumerate(sorted(names, key=int))}
    unknown = sorted(set(labels.values()) - places.keys())
    if unknown:
        raise DatasetBroken(
            f"{folder / 'image_class_labels.txt'} has class {unknown[0]}, which classes.txt does not list."
        )

    def part(flag: str) -> LazyImages:
        chosen = [number for number in sorted(files, key=int) if training[number] == flag]
        paths = [folder / "images" / files[number] for number in chosen]
        return pictures_of_files(paths, [places[labels[number]] for number in chosen], channels=3, side=SIDE)

    return Source(tuple(names[number] for number in places), part("1"), part("0"))


def _table(file: Path) -> dict[str, str]:
    """Read lines of a number and a word."""
    lines = read_lines(file)
    if any(len(words) != 2 or not words[0].isdigit() for words in lines):
        raise DatasetBroken(f"{file} has lines other than a number and a word.")
    return {words[0]: words[1] for words in lines}
