"""Each loader on a small folder in the layout of the data set's publisher."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.image_folders import loaded, save, write_cifar_binary, write_idx

from lab.datasets import fashion as fashion_module
from lab.datasets.files import DatasetBroken, DatasetMissing


class TestCifar:
    def test_the_binary_version_of_cifar10(self, tmp_path: Path) -> None:
        folder = tmp_path / "cifar10" / "cifar-10-batches-bin"
        for number in range(1, 6):
            write_cifar_binary(folder / f"data_batch_{number}.bin", [(number % 2,), (1,)])
        write_cifar_binary(folder / "test_batch.bin", [(0,), (1,)])
        (folder / "batches.meta.txt").write_text("airplane\nautomobile\n\n")
        images = loaded("cifar10", tmp_path, classes=2)
        assert images.classes == ("airplane", "automobile")
        assert images.train.labels.tolist() == [1, 1, 0, 1, 1, 1, 0, 1, 1, 1]
        assert images.train.images.shape == (10, 3, 32, 32)  # batches are enlarged to 64×64
        assert images.train.images[1, :, 5, 5].tolist() == [1, 2, 3]
        assert images.test.labels.tolist() == [0, 1]

    def test_the_fine_labels_of_cifar100(self, tmp_path: Path) -> None:
        folder = tmp_path / "cifar100"
        write_cifar_binary(folder / "train.bin", [(9, 2), (9, 0), (9, 1)])
        write_cifar_binary(folder / "test.bin", [(9, 1)])
        (folder / "fine_label_names.txt").write_text("apple\naquarium_fish\nbaby\n")
        images = loaded("cifar100", tmp_path, classes=3)
        assert images.train.labels.tolist() == [2, 0, 1]
        assert images.train.images[1, :, 0, 0].tolist() == [1, 2, 3]
        assert images.test.labels.tolist() == [1]

    def test_class_folders_of_jpegs(self, tmp_path: Path) -> None:
        for part, count in (("train", 3), ("test", 1)):
            for shade, name in ((10, "cat"), (200, "dog")):
                for number in range(count):
                    save(tmp_path / "cifar10" / part / name / f"{number:04}.jpg", shade, (32, 32))
        images = loaded("cifar10", tmp_path, classes=2)
        assert images.classes == ("cat", "dog")
        assert (images.train.labels.tolist(), images.test.labels.tolist()) == ([0, 0, 0, 1, 1, 1], [0, 1])
        assert int(images.train.images[5].float().mean().round()) == 200

    def test_truncated_file_is_named(self, tmp_path: Path) -> None:
        folder = tmp_path / "cifar100"
        write_cifar_binary(folder / "train.bin", [(0, 0)])
        (folder / "test.bin").write_bytes(b"\0" * 100)
        (folder / "fine_label_names.txt").write_text("apple\n")
        with pytest.raises(DatasetBroken, match=r"test\.bin is not a whole number of 3074-byte records"):
            loaded("cifar100", tmp_path)

    def test_pickled_batches_are_not_read(self, tmp_path: Path) -> None:
        folder = tmp_path / "cifar10" / "cifar-10-batches-py"
        folder.mkdir(parents=True)
        (folder / "data_batch_1").write_bytes(b"anything")
        with pytest.raises(DatasetMissing, match="binary version"):
            loaded("cifar10", tmp_path)


class TestFaces:
    def test_celeba_keeps_the_people_with_the_most_images(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lab.datasets.faces.CELEBA_PEOPLE", 2)
        identities = {"30": 4, "7": 3, "100": 3, "5": 1}
        lines, number = [], 0
        for identity, count in identities.items():
            for _ in range(count):
                number += 1
                path = tmp_path / "celeba" / "img_align_celeba" / f"{number:06}.jpg"
                save(path, 0, (178, 218))
                with Image.open(path) as image:
                    image.paste((255, 255, 255), (0, 20, 178, 198))  # exactly what a center crop of 178 keeps
                    image.save(path)
                lines.append(f"{path.name} {identity}")
        (tmp_path / "celeba" / "identity_CelebA.txt").write_text("\n".join(lines))
        images = loaded("celeba", tmp_path, classes=2)
        assert images.classes == ("30", "7")  # of the two with three images, the lower name
        assert images.train.images.shape == (5, 3, 128, 128)
        assert len(images.test.labels) == 2
        assert int(images.train.images[:, :, 4:-4].min()) > 240

    @pytest.mark.parametrize("listed", [True, False])
    def test_bioid_with_a_list_of_people_or_their_folders(self, listed: bool, tmp_path: Path) -> None:
        lines = []
        for number, person in enumerate(["b", "a", "a", "a", "b", "a"]):
            name = f"BioID_{number:04}.pgm"
            save(tmp_path / "bioid" / ("" if listed else person) / name, 9 * number, (384, 286), "L")
            lines.append(f"{name} {person}")
        if listed:
            (tmp_path / "bioid" / "identities.txt").write_text("\n".join(lines))
        images = loaded("bioid", tmp_path, classes=2)
        assert images.classes == ("a", "b")
        assert images.train.images.shape == (4, 1, 256, 256)
        shades = {
            int(image.max()): label
            for image, label in zip(images.train.images, images.train.labels.tolist(), strict=True)
        }
        assert all((shade in (0, 36)) == (label == 1) for shade, label in shades.items())

    def test_orl_people_come_in_the_order_of_their_numbers(self, tmp_path: Path) -> None:
        for person in (1, 2, 10):
            for number in range(1, 11):
                save(tmp_path / "orl-faces" / f"s{person}" / f"{number}.pgm", person * 10 + number, (92, 112), "L")
        images = loaded("orl-faces", tmp_path, classes=3)
        assert images.classes == ("s1", "s2", "s10")
        assert images.train.images.shape == (24, 1, 112, 92)
        assert torch.bincount(images.test.labels).tolist() == [2, 2, 2]
        shown = {int(image[0, 0, 0]) for image in torch.cat([images.train.images, images.test.images])}
        assert len(shown) == 30  # every image is in one part
        assert torch.equal(loaded("orl-faces", tmp_path, classes=3).test.images, images.test.images)


def test_bird200_keeps_the_published_parts(tmp_path: Path) -> None:
    folder = tmp_path / "bird200" / "CUB_200_2011"
    names = ["001.Albatross/a.jpg", "001.Albatross/b.jpg", "002.Auklet/c.jpg"]
    for place, name in enumerate(names):
        save(folder / "images" / name, 50 * place, (100 + place, 60), "L" if place == 2 else "RGB")
    (folder / "images.txt").write_text("".join(f"{place + 1} {name}\n" for place, name in enumerate(names)))
    (folder / "image_class_labels.txt").write_text("1 1\n2 1\n3 2\n")
    (folder / "train_test_split.txt").write_text("1 1\n2 0\n3 1\n")
    (folder / "classes.txt").write_text("1 001.Albatross\n2 002.Auklet\n")
    images = loaded("bird200", tmp_path, classes=2)
    assert images.classes == ("001.Albatross", "002.Auklet")
    assert (images.train.labels.tolist(), images.test.labels.tolist()) == ([0, 1], [0])
    assert images.train.images.shape == (2, 3, 128, 128)
    assert int(images.test.images.float().mean().round()) == 50
    (folder / "train_test_split.txt").write_text("1 1\n2 0\n")
    with pytest.raises(DatasetBroken, match="name different images"):
        loaded("bird200", tmp_path)


@pytest.mark.parametrize("nested", [1, 2])
def test_ch_mnist_in_kathers_folders(nested: int, tmp_path: Path) -> None:
    folder = tmp_path / "ch-mnist"
    for _ in range(nested):
        folder = folder / "Kather_texture_2016_image_tiles_5000"
    for place, name in enumerate(["01_TUMOR", "02_STROMA"]):
        for number in range(5):
            save(folder / name / f"{number}_CRC.tif", 100 * place, (150, 150))
    images = loaded("ch-mnist", tmp_path, classes=2)
    assert images.classes == ("01_TUMOR", "02_STROMA")
    assert images.train.images.shape == (8, 3, 64, 64)
    assert images.test.labels.tolist() == [0, 1]


class TestFashion:
    def test_idx_files(self, tmp_path: Path) -> None:
        folder = tmp_path / "fashion-mnist"
        for prefix, count in (("train", 4), ("t10k", 2)):
            pixels = np.arange(count)[:, None, None] * np.ones((1, 28, 28))
            write_idx(folder / f"{prefix}-images-idx3-ubyte.gz", pixels)
            write_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", np.arange(count) % 2)
        images = loaded("fashion-mnist", tmp_path, classes=2)
        assert images.classes == ("T-shirt", "trouser")
        assert images.train.images[:, 0, 3, 3].tolist() == [0, 1, 2, 3]
        assert images.train.labels.tolist() == [0, 1, 0, 1]
        write_idx(folder / "t10k-labels-idx1-ubyte.gz", np.arange(3) % 2)
        with pytest.raises(DatasetBroken, match="do not match"):
            loaded("fashion-mnist", tmp_path)

    def test_debians_folder_is_searched_second(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fashion_module, "DEBIAN", tmp_path / "debian")
        with pytest.raises(DatasetMissing, match="dataset-fashion-mnist"):
            loaded("fashion-mnist", tmp_path)
        for prefix in ("train", "t10k"):
            write_idx(tmp_path / "debian" / f"{prefix}-images-idx3-ubyte.gz", np.zeros((10, 28, 28)))
            write_idx(tmp_path / "debian" / f"{prefix}-labels-idx1-ubyte.gz", np.arange(10))
        assert len(loaded("fashion-mnist", tmp_path).train.labels) == 10

    @pytest.mark.parametrize("data", [b"", b"\0\0\x08\x01\0\0\0\x05ab", b"\0\0\x0d\x01\0\0\0\0"])
    def test_file_that_is_not_idx_is_refused(self, data: bytes, tmp_path: Path) -> None:
        file = tmp_path / "x.gz"
        file.write_bytes(gzip.compress(data))
        with pytest.raises(DatasetBroken, match=r"x\.gz"):
            fashion_module.read_idx(file)
        file.write_bytes(data)
        with pytest.raises(DatasetBroken, match=r"(Cannot read .*x\.gz|x\.gz is not an idx file)"):
            fashion_module.read_idx(file)


def test_a_quarter_of_each_digit_is_for_testing(tmp_path: Path) -> None:
    images = loaded("digits", tmp_path)
    assert (len(images.train.labels), len(images.test.labels)) == (1347, 450)
    shares = torch.bincount(images.test.labels) / (
        torch.bincount(images.train.labels) + torch.bincount(images.test.labels)
    )
    torch.testing.assert_close(shares, torch.full((10,), 0.25), rtol=0, atol=0.01)
