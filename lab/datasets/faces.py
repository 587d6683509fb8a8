"""Faces, one class per person: CelebA, BioID and the ORL set."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lab.datasets.files import (
    DatasetBroken,
    class_folders,
    first_existing,
    hold_out,
    image_files,
    natural,
    open_class_folders,
    pictures_of_files,
    read_lines,
)
from lab.datasets.image_set import Source

CELEBA_PEOPLE, BIOID_PEOPLE = 50, 20


def open_celeba(root: Path) -> Source | None:
    """Open the 50 identities with the most images: center crops of 178×178, resized to 128×128."""
    folder = first_existing([root, root / "celeba", root / "CelebA"], "identity_CelebA.txt")
    if folder is None or not (folder / "img_align_celeba").is_dir():
        return None
    listed = _identities(folder / "identity_CelebA.txt", folder / "img_align_celeba")
    return _largest(listed, CELEBA_PEOPLE, channels=3, crop=178, side=128)


def open_bioid(root: Path) -> Source | None:
    """Open the 20 people with the most images: center crops of 256×256. The published set does not say who is who."""
    folder = first_existing([root, root / "BioID-FaceDatabase-V1.2"], "identities.txt")
    if folder is not None:
        return _largest(_identities(folder / "identities.txt", folder), BIOID_PEOPLE, channels=1, crop=256, side=None)
    people = class_folders(root) if root.is_dir() else []
    listed = [(file, person.name) for person in people for file in image_files(person)]
    if len(people) < 2 or not listed:
        return None
    return _largest(listed, BIOID_PEOPLE, channels=1, crop=256, side=None)


def open_orl(root: Path) -> Source | None:
    """Open s1 … s40 with ten gray images of 92×112 each."""
    folders = class_folders(root) if root.is_dir() else []
    people = [folder for folder in folders if folder.name.startswith("s") and folder.name[1:].isdigit()]
    if not people:
        return None
    return hold_out(tuple(folder.name for folder in people), open_class_folders(people, channels=1))


def _identities(listing: Path, images: Path) -> list[tuple[Path, str]]:
    lines = read_lines(listing)
    wrong = next((number for number, words in enumerate(lines, start=1) if len(words) != 2), None)
    if wrong is not None:
        raise DatasetBroken(f"{listing}: line {wrong} is not a file name and an identity.")
    return [(images / name, identity) for name, identity in lines]


def _largest(listed: Sequence[tuple[Path, str]], people: int, *, channels: int, crop: int, side: int | None) -> Source:
    """Keep the identities with the most images, most first; ties go to the lower name."""
    counts = Counter(identity for _, identity in listed)
    names = tuple(sorted(counts, key=lambda identity: (-counts[identity], natural(identity)))[:people])
    places = {identity: place for place, identity in enumerate(names)}
    kept = sorted(
        ((file, places[identity]) for file, identity in listed if identity in places),
        key=lambda entry: natural(str(entry[0])),
    )
    files, labels = [file for file, _ in kept], [label for _, label in kept]
    return hold_out(names, pictures_of_files(files, labels, channels, crop=crop, side=side))
