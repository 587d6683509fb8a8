from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from client_agent.data.sources import open_source
from client_agent.data.splits import Example
from lab.__main__ import app
from lab.datasets.site_folders import _keep, plan_split
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


class TestFewImages:
    @given(cats=st.integers(4, 40), dogs=st.integers(4, 40), wanted=st.integers(2, 80), seed=st.integers(0, 5))
    def test_site_trains_on_a_stratified_part_and_tests_with_the_rest(
        self, cats: int, dogs: int, wanted: int, seed: int
    ) -> None:
        images = [Example(torch.full((1, 1, 1), number / 255), "cat") for number in range(cats)]
        images += [Example(torch.full((1, 1, 1), number / 255), "dog") for number in range(dogs)]
        kept, rest = _keep(images, wanted, seed, "site-001")
        assert len(kept) == min(wanted, cats + dogs)
        assert sorted(map(id, kept + rest)) == sorted(map(id, images))
        share = len(kept) / len(images)
        for label, count in (("cat", cats), ("dog", dogs)):
            assert max(1, share * count - 1) <= sum(one.label == label for one in kept) <= share * count + 1

    def test_every_site_gets_as_many_as_asked_for(self) -> None:
        all_of_them = plan_split("sklearn:digits", clients=10, dh=0.6, seed=3)
        few = plan_split("sklearn:digits", clients=10, dh=0.6, seed=3, images=50)
        assert few.dh == all_of_them.dh == 0.6
        for site, whole in zip(few.sites, all_of_them.sites, strict=True):
            assert (len(site.train), site.classes) == (50, whole.classes)
            assert len(site.train + site.test) == len(whole.train + whole.test)

    def test_same_seed_keeps_the_same_images(self) -> None:
        first, second = (plan_split("sklearn:digits", clients=1, dh=1, seed=4, images=30).sites[0] for _ in range(2))
        assert all(torch.equal(one.item, other.item) for one, other in zip(first.train, second.train, strict=True))

    def test_fewer_images_than_classes_are_refused(self) -> None:
        with pytest.raises(SplitError) as caught:
            plan_split("sklearn:digits", clients=10, dh=0.6, seed=0, images=3)
        assert str(caught.value) == (
            "site-001 has 4 classes and cannot train on 3 images. Use --images 4 or more, or 0 for all."
        )


class TestShift:
    def test_every_other_sites_images_are_inverted_on_disk(self, tmp_path: Path) -> None:
        images = write_images(tmp_path / "images", cat=20, dog=20)
        division = plan_split(str(images), clients=2, dh=0, seed=0, shift="inverted")
        plain, inverted = (share.write(tmp_path / "sites") for share in division.sites)
        assert (plain.scanner, inverted.scanner) == ("plain", "inverted")
        for site, share in zip((plain, inverted), division.sites, strict=True):
            for part, examples in (("train", share.train), ("test", share.test)):
                expected = sorted((e.label, int(pixels_of(Path(str(e.item)))[0, 0])) for e in examples)
                found = [(file.parent.name, int(pixels_of(file)[0, 0])) for file in (site.path / part).rglob("*.png")]
                if site is inverted:
                    found = [(label, 255 - gray) for label, gray in found]
                assert sorted(found) == expected

    def test_files_of_a_plain_scanner_are_copied_byte_by_byte(self, tmp_path: Path) -> None:
        images = write_images(tmp_path / "images", cat=8)
        share = plan_split(str(images), clients=1, dh=1, seed=0, shift="rotated").sites[0]
        written = {file.read_bytes() for file in share.write(tmp_path / "sites").path.rglob("*.png")}
        assert written == {file.read_bytes() for file in images.rglob("*.png")}

    def test_broken_image_leaves_nothing_of_the_site(self, tmp_path: Path) -> None:
        images = write_images(tmp_path / "images", cat=20)
        division = plan_split(str(images), clients=2, dh=0, seed=0, shift="inverted")
        Path(str(division.sites[1].test[-1].item)).write_bytes(b"no image")
        with pytest.raises(SplitError, match="Unsupported image format"):
            division.sites[1].write(tmp_path / "sites")
        assert list((tmp_path / "sites").iterdir()) == []

    def test_split_command_names_the_scanners(self, tmp_path: Path) -> None:
        options = ["--clients", "2", "--dh", "1", "--shift", "inverted", "--images", "20"]
        target = tmp_path / "s"
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["split", "sklearn:digits", str(target), *options])
        assert result.exit_code == 0
        rows = [line.split("│") for line in result.stdout.splitlines() if "site-00" in line]
        assert [(row[3].strip(), row[4].strip()) for row in rows] == [("20", "plain"), ("20", "inverted")]
        assert len(list((target / "site-002" / "train").rglob("*.png"))) == 20

    def test_unknown_shift_is_refused_with_the_known_ones(self, tmp_path: Path) -> None:
        result = CliRunner(env={"COLUMNS": "200"}).invoke(
            app, ["split", "sklearn:digits", str(tmp_path / "s"), "--shift", "upside-down"]
        )
        assert result.exit_code == 2
        assert "'upside-down' is not one of none, rotated, inverted." in result.stderr
