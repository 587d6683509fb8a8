"""Finding data sets by name, and loading all or some of their images."""

from pathlib import Path

import pytest
import torch
from support.image_folders import loaded, save, write_cifar_binary

from lab.datasets.files import DatasetBroken, DatasetMissing
from lab.datasets.registry import KNOWN, data_root


class TestIncompleteSets:
    def test_say_how_many_classes_are_missing(self, tmp_path: Path) -> None:
        for number in range(1, 8):
            save(tmp_path / "ch-mnist" / f"{number:02}_TISSUE" / "1.tif", 0, (150, 150))
        with pytest.raises(DatasetBroken) as caught:
            loaded("ch-mnist", tmp_path)
        assert caught.value.message == f"ch-mnist in {tmp_path} has 7 of 8 classes."
        assert caught.value.next_step.startswith("Get the rest, or use fewer (classes = N). Download Kather")
        assert len(loaded("ch-mnist", tmp_path, classes=7).classes) == 7
        save(tmp_path / "ch-mnist" / "08_EMPTY" / "1.tif", 0, (150, 150))
        assert len(loaded("ch-mnist", tmp_path).classes) == 8

    def test_may_lack_people(self, tmp_path: Path) -> None:
        save(tmp_path / "celeba" / "img_align_celeba" / "1.jpg", 0, (178, 218))
        (tmp_path / "celeba" / "identity_CelebA.txt").write_text("1.jpg 1\n1.jpg 2\n")
        with pytest.raises(DatasetBroken, match="has 2 of 50 classes"):
            loaded("celeba", tmp_path)

    def test_may_have_a_class_without_images(self, tmp_path: Path) -> None:
        folder = tmp_path / "cifar100"
        write_cifar_binary(folder / "train.bin", [(9, 2), (9, 0)])
        write_cifar_binary(folder / "test.bin", [(9, 1)])
        (folder / "fine_label_names.txt").write_text("apple\naquarium_fish\nbaby\n")
        with pytest.raises(DatasetBroken, match="cifar100 has no training images of aquarium_fish"):
            loaded("cifar100", tmp_path, classes=3)


@pytest.mark.parametrize("name", [name for name in KNOWN if name not in ("digits", "fashion-mnist")])
def test_missing_data_set_names_the_folder_and_where_to_get_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetMissing) as caught:
        loaded(name, tmp_path)
    assert str(tmp_path / name) in str(caught.value)
    assert KNOWN[name].obtain in str(caught.value)


def test_cifar10_is_normalized_as_in_the_authors_code() -> None:
    image = KNOWN["cifar10"].image
    assert (image.mean, image.std) == ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


def test_root_is_the_option_then_the_environment_then_the_current_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTRANS_DATA", raising=False)
    assert data_root() == Path("data")
    monkeypatch.setenv("DISTRANS_DATA", "/somewhere")
    assert data_root() == Path("/somewhere")
    assert data_root(Path("given")) == Path("given")


def test_subset_has_the_requested_images_per_class_and_is_always_the_same(tmp_path: Path) -> None:
    images = loaded("digits", tmp_path, classes=4, train_per_class=20, test_per_class=7)
    assert torch.bincount(images.train.labels).tolist() == [20] * 4
    assert torch.bincount(images.test.labels).tolist() == [7] * 4
    again = loaded("digits", tmp_path, classes=4, train_per_class=20, test_per_class=7)
    assert torch.equal(images.train.images, again.train.images)
