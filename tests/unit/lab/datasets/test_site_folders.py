from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from client_agent.data.sources import open_source
from lab.__main__ import app
from lab.datasets.site_folders import plan_split
from shared.contract.errors import SplitError


def write_images(folder: Path, **classes: int) -> Path:
    """Write class folders with this many images each, every image in another gray."""
    for label, count in classes.items():
        (folder / label).mkdir(parents=True)
        for number in range(count):
            Image.new("L", (4, 4), number).save(folder / label / f"{number}.png")
    return folder


def test_every_image_goes_to_one_site_and_part(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", cat=20, dog=20)
    division = plan_split(str(images), clients=2, dh=1, seed=0)
    assert (division.classes, division.dh) == (("cat", "dog"), 1.0)
    items = [example.item for site in division.sites for example in site.train + site.test]
    assert len(items) == len(set(items)) == 40
    assert [site.name for site in division.sites] == ["site-001", "site-002"]
    assert sorted(site.classes for site in division.sites) == [("cat",), ("dog",)]


def test_agent_accepts_a_sites_folder(tmp_path: Path) -> None:
    division = plan_split(str(write_images(tmp_path / "images", cat=20, dog=20)), clients=2, dh=0, seed=0)
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


def test_pixels_become_image_files_of_the_same_gray(tmp_path: Path) -> None:
    """scikit-learn's digits have 17 gray levels; all remain, evenly spread over 0 … 255."""
    whole = plan_split("sklearn:digits", clients=1, dh=1, seed=0).sites[0]
    folder = replace(whole, train=whole.train[:40], test=[]).write(tmp_path)
    grays = {int(gray) for file in folder.path.rglob("*.png") for gray in np.unique(pixels_of(file))}
    assert grays == {round(level * 255 / 16) for level in range(17)}
    assert list(tmp_path.iterdir()) == [folder.path]


def test_arrays_with_numeric_labels_are_split(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", images=np.zeros((20, 8, 8, 3), np.uint8), labels=np.arange(20) % 2)
    division = plan_split(str(tmp_path / "set.npz"), clients=2, dh=1, seed=0)
    assert division.classes == ("0", "1")
    file = next(division.sites[0].write(tmp_path / "sites").path.rglob("*.png"))
    assert pixels_of(file).shape == (8, 8, 3)


@pytest.mark.parametrize("label", ["../elsewhere", "/etc", ".hidden", "a\\b"])
def test_class_name_never_leads_out_of_the_folder(label: str, tmp_path: Path) -> None:
    image = write_images(tmp_path / "images", cat=1) / "cat" / "0.png"
    rows = "".join(f"{image},{label}\n" for _ in range(10))
    (tmp_path / "list.csv").write_text("path,label\n" + rows)
    with pytest.raises(SplitError, match="cannot be used as a folder name"):
        plan_split(str(tmp_path / "list.csv"), clients=1, dh=0, seed=0)


def write_list(folder: Path, *extra: str) -> Path:
    """Write a .csv of ten cats, ten dogs and the named files."""
    write_images(folder / "images", cat=10, dog=10)
    rows = [f"{file.relative_to(folder)},{file.parent.name}" for file in sorted((folder / "images").rglob("*.png"))]
    file = folder / "list.csv"
    file.write_text("\n".join(["path,label", *rows, *(f"{name},dog" for name in extra)]))
    return file


@pytest.mark.parametrize("name", ["absent.png", "images"])
def test_unreadable_image_is_named_before_anything_is_written(name: str, tmp_path: Path) -> None:
    listed, target = write_list(tmp_path, name), tmp_path / "sites"
    result = CliRunner().invoke(app, ["split", str(listed), str(target), "--clients", "2", "--dh", "1"])
    assert isinstance(result.exception, SplitError)
    assert str(tmp_path / name) in result.exception.message
    assert result.exception.next_step == "Fix the path or the file."
    assert not target.exists()


def test_pixels_that_no_image_file_can_hold_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", images=np.zeros((20, 2, 8, 8), np.uint8), labels=np.arange(20) % 2)
    with pytest.raises(SplitError, match="have 2 channels; image files need 1 or 3"):
        plan_split(str(tmp_path / "set.npz"), clients=2, dh=1, seed=0)


def test_failed_write_leaves_nothing_of_the_site(tmp_path: Path) -> None:
    listed = write_list(tmp_path)
    share = plan_split(str(listed), clients=1, dh=1, seed=0).sites[0]
    Path(str(share.train[-1].item)).unlink()  # after the check
    with pytest.raises(SplitError) as caught:
        share.write(tmp_path / "sites")
    assert str(share.train[-1].item) in caught.value.message
    assert caught.value.next_step == f"Empty {tmp_path / 'sites'}, then run the command again."
    assert list((tmp_path / "sites").iterdir()) == []


def test_existing_site_folder_is_left_alone(tmp_path: Path) -> None:
    share = plan_split(str(write_list(tmp_path)), clients=1, dh=1, seed=0).sites[0]
    kept = write_images(tmp_path / "sites" / share.name, bird=1) / "bird" / "0.png"
    with pytest.raises(SplitError, match="Cannot write"):
        share.write(tmp_path / "sites")
    assert kept.exists()


def test_site_may_lack_test_images_of_a_class_or_all_of_them(tmp_path: Path) -> None:
    for part, cats, dogs in (("train", 12, 12), ("test", 2, 9)):
        write_images(tmp_path / "images" / part, cat=cats, dog=dogs)
    sites = plan_split(str(tmp_path / "images"), clients=3, dh=0, seed=0).sites
    assert all({example.label for example in site.test} == {"dog"} for site in sites)
    assert all(site.classes == ("cat", "dog") for site in sites)
    taken = open_source(str(sites[0].write(tmp_path / "sites").path), 0, ())
    assert (len(taken.train), len(taken.test)) == (len(sites[0].train), len(sites[0].test))
    folder = replace(sites[1], test=[]).write(tmp_path / "sites").path
    assert len(open_source(str(folder), 0, ()).test) > 0  # the agent's choice


def test_class_with_too_few_images_is_named(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", cat=30, dog=3)
    with pytest.raises(SplitError, match="Class dog has 2 training images, too few for its 4 clients"):
        plan_split(str(images), clients=4, dh=0, seed=0)


def test_number_of_sites_that_does_not_fit_is_refused_with_those_that_do() -> None:
    with pytest.raises(SplitError) as caught:
        plan_split("sklearn:digits", clients=4, dh=0.6, seed=0)
    assert str(caught.value) == (
        "4 clients with 10 classes cannot have DH 60%. They can have 0%, 50%; 5 or 10 clients can have 60%."
    )
