from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from client_agent.sources import open_source
from lab.splitting import divide
from shared.problems import SplitError


def write_images(folder: Path, **classes: int) -> Path:
    """Class folders with so many images each, every image of another grey."""
    for label, count in classes.items():
        (folder / label).mkdir(parents=True)
        for number in range(count):
            Image.new("L", (4, 4), number).save(folder / label / f"{number}.png")
    return folder


def test_every_image_goes_to_one_site_and_part(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", cat=20, dog=20)
    division = divide(str(images), clients=2, dh=1, seed=0)
    assert (division.classes, division.dh) == (("cat", "dog"), 1.0)
    items = [example.item for site in division.sites for example in site.train + site.test]
    assert len(items) == len(set(items)) == 40
    assert [site.name for site in division.sites] == ["site-001", "site-002"]
    assert sorted(site.classes for site in division.sites) == [("cat",), ("dog",)]


def test_a_sites_folder_is_what_an_agent_takes(tmp_path: Path) -> None:
    division = divide(str(write_images(tmp_path / "images", cat=20, dog=20)), clients=2, dh=0, seed=0)
    share = division.sites[0]
    folder = share.write(tmp_path / "sites")
    assert (folder.path, folder.images, folder.classes) == (
        tmp_path / "sites" / "site-001",
        len(share.train),
        ("cat", "dog"),
    )
    taken = open_source(str(folder.path), 0, ())
    for written, meant in ((taken.train, share.train), (taken.test, share.test)):
        contents = [sorted((e.label, Path(str(e.item)).read_bytes()) for e in part) for part in (written, meant)]
        assert contents[0] == contents[1]


def pixels_of(file: Path) -> np.ndarray:
    with Image.open(file) as image:
        return np.asarray(image)


def test_pixels_become_image_files_of_the_same_grey(tmp_path: Path) -> None:
    """scikit-learn's digits have 17 greys; as many are left, evenly spread over 0 … 255."""
    whole = divide("sklearn:digits", clients=1, dh=1, seed=0).sites[0]
    folder = replace(whole, train=whole.train[:40], test=[]).write(tmp_path)
    greys = {int(grey) for file in folder.path.rglob("*.png") for grey in np.unique(pixels_of(file))}
    assert greys == {round(level * 255 / 16) for level in range(17)}
    assert list(tmp_path.iterdir()) == [folder.path]


def test_arrays_that_number_their_classes(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", images=np.zeros((20, 8, 8, 3), np.uint8), labels=np.arange(20) % 2)
    division = divide(str(tmp_path / "set.npz"), clients=2, dh=1, seed=0)
    assert division.classes == ("0", "1")
    file = next(division.sites[0].write(tmp_path / "sites").path.rglob("*.png"))
    assert pixels_of(file).shape == (8, 8, 3)


@pytest.mark.parametrize("label", ["../elsewhere", "/etc", ".hidden", "a\\b"])
def test_a_class_name_never_leads_out_of_the_folder(label: str, tmp_path: Path) -> None:
    image = write_images(tmp_path / "images", cat=1) / "cat" / "0.png"
    rows = "".join(f"{image},{label}\n" for _ in range(10))
    (tmp_path / "list.csv").write_text("path,label\n" + rows)
    with pytest.raises(SplitError, match="cannot be the name of a folder"):
        divide(str(tmp_path / "list.csv"), clients=1, dh=0, seed=0)


def test_a_number_of_sites_that_does_not_fit() -> None:
    with pytest.raises(SplitError) as caught:
        divide("sklearn:digits", clients=4, dh=0.6, seed=0)
    assert str(caught.value) == (
        "4 clients with 10 classes cannot have DH 60%. They can have 0%, 50%; 5 or 10 clients can have 60%."
    )
