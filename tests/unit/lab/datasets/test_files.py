"""Folders of images: layouts, decoding and sorting."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.image_folders import loaded, save

from lab.datasets.files import DatasetBroken, natural, pictures_of_files
from shared.contract.plan import ImagePlan


def test_any_folder_of_classes(tmp_path: Path) -> None:
    for shade, name in ((10, "cat"), (200, "dog")):
        for number in range(5):
            save(tmp_path / "pets" / name / f"{number}.png", shade, (20 + number, 30))
    image = ImagePlan(channels=1, height=16, width=16)
    images = loaded("folder:pets", tmp_path, image)
    assert images.classes == ("cat", "dog")
    assert images.train.images.shape == (8, 1, 16, 16)
    assert torch.equal(
        loaded(f"folder:{tmp_path / 'pets'}", Path("elsewhere"), image).train.images, images.train.images
    )
    for name in ("cat", "dog"):
        save(tmp_path / "parted" / "train" / name / "1.png", 0)
    save(tmp_path / "parted" / "test" / "cow" / "1.png", 0)
    with pytest.raises(DatasetBroken, match="cow"):
        loaded("folder:parted", tmp_path, image)


class TestBrokenFolders:
    LAYOUT = "Arrange the images of two or more classes as CLASS/*, or as train/CLASS/* and test/CLASS/*."

    @pytest.mark.parametrize("inside", ["", "train"])
    def test_without_class_folders_are_named_with_the_layout(self, inside: str, tmp_path: Path) -> None:
        folder = tmp_path / "pets" / inside
        save(folder / "cat.png", 0)
        with pytest.raises(DatasetBroken) as caught:
            loaded("folder:pets", tmp_path)
        assert caught.value.message == f"{folder} has no class folders."
        assert caught.value.next_step == self.LAYOUT

    def test_with_one_class_are_named_with_the_layout(self, tmp_path: Path) -> None:
        save(tmp_path / "pets" / "cat" / "1.png", 0)
        with pytest.raises(DatasetBroken) as caught:
            loaded("folder:pets", tmp_path)
        assert caught.value.message == f"{tmp_path / 'pets'} has only one class folder, cat."
        assert caught.value.next_step == self.LAYOUT

    def test_with_an_empty_class_folder_name_the_class(self, tmp_path: Path) -> None:
        for name in ("cat", "dog"):
            save(tmp_path / "pets" / name / "1.png", 0)
        (tmp_path / "pets" / "cow").mkdir()
        with pytest.raises(DatasetBroken) as caught:
            loaded("folder:pets", tmp_path)
        assert caught.value.message == "folder:pets has no training images of cow."
        assert caught.value.next_step == "Every class needs some. Create one folder of images per class."


class TestDecoding:
    """Single files, read as the images of a folder are."""

    def read(self, file: Path, channels: int, crop: int | None = None) -> torch.Tensor:
        return pictures_of_files([file], [0], channels, crop=crop).read(np.array([0]))[0]

    @pytest.mark.parametrize("channels", [1, 3])
    @pytest.mark.parametrize("mode", ["L", "RGB", "P", "1", "CMYK"])
    def test_8_bit_images_are_what_pillow_converts_them_to(self, mode: str, channels: int, tmp_path: Path) -> None:
        """Bit for bit: published measurements depend on it."""
        values = np.random.default_rng(0).integers(0, 256, (64, 48, 3), dtype=np.uint8)
        values[:16, :16] = np.arange(256, dtype=np.uint8).reshape(16, 16, 1)
        file = tmp_path / "image.tif"
        Image.fromarray(values).convert(mode).save(file)
        with Image.open(file) as image:
            assert image.mode == mode
            expected = np.asarray(image.convert("L" if channels == 1 else "RGB")).reshape(64, 48, channels)
        np.testing.assert_array_equal(self.read(file, channels).permute(1, 2, 0).numpy(), expected)

    @pytest.mark.parametrize("channels", [1, 3])
    @pytest.mark.parametrize(
        ("name", "values"),
        [
            ("16-bit.png", np.arange(256, dtype=np.uint16).reshape(16, 16) * 257),
            ("16-bit.tif", np.arange(256, dtype=np.uint16).reshape(16, 16) * 257),
            ("float.tif", np.arange(256, dtype=np.float32).reshape(16, 16) / 255),
        ],
    )
    def test_deeper_images_keep_their_gray_levels(
        self, name: str, values: np.ndarray, channels: int, tmp_path: Path
    ) -> None:
        Image.fromarray(values).save(tmp_path / name)
        for channel in self.read(tmp_path / name, channels):
            assert channel.flatten().tolist() == list(range(256))

    def test_transparent_pixels_stay_hidden(self, tmp_path: Path) -> None:
        image = Image.new("RGBA", (2, 1), (200, 100, 50, 0))
        image.putpixel((1, 0), (200, 100, 50, 255))
        image.save(tmp_path / "image.png")
        assert self.read(tmp_path / "image.png", 3)[:, 0].T.tolist() == [[0, 0, 0], [200, 100, 50]]

    def test_images_larger_than_a_plan_allows_are_read(self, tmp_path: Path) -> None:
        Image.new("L", (5000, 2), 7).save(tmp_path / "wide.png")
        assert self.read(tmp_path / "wide.png", 1).shape == (1, 2, 5000)

    @pytest.mark.parametrize("size", [(177, 218), (218, 177)])
    def test_crop_larger_than_the_image_is_refused(self, size: tuple[int, int], tmp_path: Path) -> None:
        save(tmp_path / "face.png", 9, size)
        with pytest.raises(DatasetBroken) as caught:
            self.read(tmp_path / "face.png", 3, crop=178)
        width, height = size
        assert str(caught.value) == f"{tmp_path / 'face.png'} is {width}×{height}, too small for a 178×178 crop."


def test_numbers_in_names_count_as_numbers() -> None:
    assert sorted(["s10", "s2", "a", "s2b1", "10", "9"], key=natural) == ["9", "10", "a", "s2", "s2b1", "s10"]
