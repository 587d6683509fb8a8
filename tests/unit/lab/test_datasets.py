"""Each loader on a small folder in the layout that the set's publisher uses."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lab.datasets import KNOWN, DataSettings, ImageSet, data_root, make_clients, make_indexed_clients, open_set
from lab.datasets import fashion as fashion_module
from lab.datasets.clients import Negatives
from lab.datasets.files import DatasetBroken, DatasetMissing, natural, pictures_of_files
from lab.datasets.image_set import Part, Shift, shifted
from lab.datasets.registry import known
from shared.heterogeneity import Shares, paper_shares
from shared.measuring import evaluate
from shared.plan import ImagePlan
from shared.problems import SplitError
from shared.tensor_data import TensorData


def loaded(name: str, root: Path, image: ImagePlan | None = None, **settings: int) -> ImageSet:
    open_set.cache_clear()
    return open_set(DataSettings.model_validate({"name": name, **settings}), image or known(name).image, root)


def save(path: Path, shade: int, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, (shade,) * 3 if mode == "RGB" else shade).save(path)


def write_cifar_binary(file: Path, labels: list[tuple[int, ...]]) -> None:
    """Image i is filled with i in red, i + 1 in green, i + 2 in blue."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = [np.repeat(np.arange(3, dtype=np.uint8) + place, 1024).tobytes() for place in range(len(labels))]
    file.write_bytes(b"".join(bytes(label) + image for label, image in zip(labels, pixels, strict=True)))


def write_idx(file: Path, values: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    file.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes()))


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
        assert images.train.images.shape == (10, 3, 32, 32)  # enlarged to 64×64 a batch at a time
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

    def test_a_file_that_was_cut_off_is_named(self, tmp_path: Path) -> None:
        folder = tmp_path / "cifar100"
        write_cifar_binary(folder / "train.bin", [(0, 0)])
        (folder / "test.bin").write_bytes(b"\0" * 100)
        (folder / "fine_label_names.txt").write_text("apple\n")
        with pytest.raises(DatasetBroken, match=r"test\.bin does not consist of records of 3074 bytes"):
            loaded("cifar100", tmp_path)

    def test_pickled_batches_are_no_data_set(self, tmp_path: Path) -> None:
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
                    image.paste((255, 255, 255), (0, 20, 178, 198))  # just what a centre crop of 178 leaves
                    image.save(path)
                lines.append(f"{path.name} {identity}")
        (tmp_path / "celeba" / "identity_CelebA.txt").write_text("\n".join(lines))
        images = loaded("celeba", tmp_path, classes=2)
        assert images.classes == ("30", "7")  # of the two with three images the lower one
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
    with pytest.raises(DatasetBroken, match="not about the same images"):
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
        with pytest.raises(DatasetBroken, match="do not belong together"):
            loaded("fashion-mnist", tmp_path)

    def test_debians_folder_is_the_second_place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fashion_module, "DEBIAN", tmp_path / "debian")
        with pytest.raises(DatasetMissing, match="dataset-fashion-mnist"):
            loaded("fashion-mnist", tmp_path)
        for prefix in ("train", "t10k"):
            write_idx(tmp_path / "debian" / f"{prefix}-images-idx3-ubyte.gz", np.zeros((10, 28, 28)))
            write_idx(tmp_path / "debian" / f"{prefix}-labels-idx1-ubyte.gz", np.arange(10))
        assert len(loaded("fashion-mnist", tmp_path).train.labels) == 10

    @pytest.mark.parametrize("data", [b"", b"\0\0\x08\x01\0\0\0\x05ab", b"\0\0\x0d\x01\0\0\0\0"])
    def test_what_is_not_idx_is_refused(self, data: bytes, tmp_path: Path) -> None:
        file = tmp_path / "x.gz"
        file.write_bytes(gzip.compress(data))
        with pytest.raises(DatasetBroken, match=r"x\.gz"):
            fashion_module.read_idx(file)
        file.write_bytes(data)
        with pytest.raises(DatasetBroken, match=r"x\.gz (cannot be read|is not an idx file)"):
            fashion_module.read_idx(file)


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
    LAYOUT = "Lay out the images of two or more classes as CLASS/*, or as train/CLASS/* and test/CLASS/*."

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
        assert caught.value.message == f"{tmp_path / 'pets'} has one class folder, cat."
        assert caught.value.next_step == self.LAYOUT

    def test_with_an_empty_class_folder_name_the_class(self, tmp_path: Path) -> None:
        for name in ("cat", "dog"):
            save(tmp_path / "pets" / name / "1.png", 0)
        (tmp_path / "pets" / "cow").mkdir()
        with pytest.raises(DatasetBroken) as caught:
            loaded("folder:pets", tmp_path)
        assert caught.value.message == "folder:pets has no training images of cow."
        assert caught.value.next_step == "Each class needs some. Lay out one folder of images per class."


class TestIncompleteSets:
    def test_say_how_many_classes_there_are_and_should_be(self, tmp_path: Path) -> None:
        for number in range(1, 8):
            save(tmp_path / "ch-mnist" / f"{number:02}_TISSUE" / "1.tif", 0, (150, 150))
        with pytest.raises(DatasetBroken) as caught:
            loaded("ch-mnist", tmp_path)
        assert caught.value.message == f"ch-mnist under {tmp_path} has 7 classes; there should be 8."
        assert caught.value.next_step.startswith("Get the rest, or ask for fewer (classes = N). Download Kather")
        assert len(loaded("ch-mnist", tmp_path, classes=7).classes) == 7
        save(tmp_path / "ch-mnist" / "08_EMPTY" / "1.tif", 0, (150, 150))
        assert len(loaded("ch-mnist", tmp_path).classes) == 8

    def test_may_lack_people(self, tmp_path: Path) -> None:
        save(tmp_path / "celeba" / "img_align_celeba" / "1.jpg", 0, (178, 218))
        (tmp_path / "celeba" / "identity_CelebA.txt").write_text("1.jpg 1\n1.jpg 2\n")
        with pytest.raises(DatasetBroken, match="has 2 classes; there should be 50"):
            loaded("celeba", tmp_path)

    def test_may_have_a_class_without_images(self, tmp_path: Path) -> None:
        folder = tmp_path / "cifar100"
        write_cifar_binary(folder / "train.bin", [(9, 2), (9, 0)])
        write_cifar_binary(folder / "test.bin", [(9, 1)])
        (folder / "fine_label_names.txt").write_text("apple\naquarium_fish\nbaby\n")
        with pytest.raises(DatasetBroken, match="cifar100 has no training images of aquarium_fish"):
            loaded("cifar100", tmp_path, classes=3)


class TestDecoding:
    """Of single files, as a folder's images are read."""

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
    def test_deeper_images_keep_their_greys(self, name: str, values: np.ndarray, channels: int, tmp_path: Path) -> None:
        Image.fromarray(values).save(tmp_path / name)
        for channel in self.read(tmp_path / name, channels):
            assert channel.flatten().tolist() == list(range(256))

    def test_what_transparency_hides_stays_hidden(self, tmp_path: Path) -> None:
        image = Image.new("RGBA", (2, 1), (200, 100, 50, 0))
        image.putpixel((1, 0), (200, 100, 50, 255))
        image.save(tmp_path / "image.png")
        assert self.read(tmp_path / "image.png", 3)[:, 0].T.tolist() == [[0, 0, 0], [200, 100, 50]]

    def test_images_larger_than_a_plan_may_ask_for_are_read(self, tmp_path: Path) -> None:
        Image.new("L", (5000, 2), 7).save(tmp_path / "wide.png")
        assert self.read(tmp_path / "wide.png", 1).shape == (1, 2, 5000)

    @pytest.mark.parametrize("size", [(177, 218), (218, 177)])
    def test_a_square_larger_than_the_image_is_refused(self, size: tuple[int, int], tmp_path: Path) -> None:
        save(tmp_path / "face.png", 9, size)
        with pytest.raises(DatasetBroken) as caught:
            self.read(tmp_path / "face.png", 3, crop=178)
        width, height = size
        assert str(caught.value) == f"{tmp_path / 'face.png'} is {width}×{height}, too small to cut 178×178 from it."


@pytest.mark.parametrize("name", [name for name in KNOWN if name not in ("digits", "fashion-mnist")])
def test_a_set_that_is_not_there_says_what_to_get_and_where_it_was_looked_for(name: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetMissing) as caught:
        loaded(name, tmp_path)
    assert str(tmp_path / name) in str(caught.value)
    assert KNOWN[name].obtain in str(caught.value)


def test_the_root_is_the_option_then_the_environment_then_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTRANS_DATA", raising=False)
    assert data_root() == Path("data")
    monkeypatch.setenv("DISTRANS_DATA", "/somewhere")
    assert data_root() == Path("/somewhere")
    assert data_root(Path("given")) == Path("given")


def test_a_subset_has_so_many_of_each_class_and_is_always_the_same(tmp_path: Path) -> None:
    images = loaded("digits", tmp_path, classes=4, train_per_class=20, test_per_class=7)
    assert torch.bincount(images.train.labels).tolist() == [20] * 4
    assert torch.bincount(images.test.labels).tolist() == [7] * 4
    again = loaded("digits", tmp_path, classes=4, train_per_class=20, test_per_class=7)
    assert torch.equal(images.train.images, again.train.images)


class TestClients:
    @pytest.fixture
    def digits(self, tmp_path: Path) -> ImageSet:
        return loaded("digits", tmp_path)

    def test_hold_indices_into_one_copy_and_see_what_the_network_sees(self, digits: ImageSet) -> None:
        clients = make_indexed_clients(digits, paper_shares(10, 10, 4, seed=0), seed=0)
        assert all(client.train.part is digits.train for client in clients)
        images, labels = next(iter(clients[3].train.batches(16, seed=5)))
        assert images.shape == (16, 1, 16, 16)
        assert set(labels.tolist()) <= clients[3].own_classes
        order = torch.randperm(clients[3].train.samples, generator=torch.Generator().manual_seed(5))
        first = digits.train.images[clients[3].train.indices[order[0]]]
        doubled = torch.nn.functional.interpolate(first[None].float() / 255, size=(16, 16), mode="bilinear")
        torch.testing.assert_close(images[:1], (doubled - 0.5) / 0.5)
        taken = torch.cat([client.train.indices for client in clients])
        assert len(taken.unique()) == len(taken)

    def test_with_one_class_each_have_as_many_negatives(self, digits: ImageSet) -> None:
        clients = make_indexed_clients(digits, paper_shares(10, 10, 1, seed=0), seed=0)
        for client in clients:
            (own,) = client.own_classes
            positive = client.test.labels == own
            assert int(positive.sum()) * 2 == client.test.samples == 2 * int((digits.test.labels == own).sum())

        def own_class(images: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot(torch.full((len(images),), own), 10).float()

        result = evaluate(own_class, client.test.batches(64, 0), client.own_classes)
        assert (result.accuracy, result.positive_accuracy, result.negative_accuracy) == (0.5, 1, 0)
        assert (result.negatives_as_own, result.binary_accuracy) == (result.negatives, 0.5)

    def test_negatives_follow_the_seed(self, digits: ImageSet) -> None:
        def drawn(seed: int) -> list[int]:
            client = make_indexed_clients(digits, paper_shares(10, 10, 1, seed=0), seed)[0]
            return [int(index) for index in client.test.indices[client.test.samples // 2 :]]

        assert drawn(1) == drawn(1) != drawn(2)

    @pytest.mark.parametrize(
        ("clients", "each", "negatives", "added"),
        [
            (10, 2, "auto", False),
            (5, 2, "auto", False),
            (20, 1, "auto", False),
            (5, 2, "always", True),
            (10, 1, "never", False),
        ],
    )
    def test_negatives_only_where_a_client_is_alone_with_its_one_class_or_when_asked_for(
        self, clients: int, each: int, negatives: str, added: bool, digits: ImageSet
    ) -> None:
        sites = make_indexed_clients(digits, paper_shares(10, clients, each, seed=0), 0, negatives)
        site = sites[0]
        foreign = [label for label in site.test.labels.tolist() if label not in site.own_classes]
        assert (len(foreign) > 0) == added


class TestClientsOfFewImages:
    SHARES = Shares(np.array([[0.3, 0.3], [0.7, 0.7]]), keep_all=False)

    def few(self, *, train: int, test: int) -> ImageSet:
        """Two classes with so many images each."""
        parts = (Part(torch.zeros(2 * n, 1, 4, 4).byte(), torch.arange(2 * n) % 2) for n in (train, test))
        return ImageSet(("cat", "dog"), ImagePlan(channels=1, height=4, width=4), *parts)

    @pytest.mark.parametrize("negatives", ["never", "always"])
    def test_may_have_none_for_testing_and_then_have_no_accuracy(self, negatives: Negatives) -> None:
        images = self.few(train=10, test=2)
        parts = [TensorData(part.images.float(), part.labels) for part in (images.train, images.test)]
        for clients in (make_indexed_clients(images, self.SHARES, 0, negatives), make_clients(*parts, self.SHARES, 0)):
            assert [(client.own_classes, client.test.samples) for client in clients] == [({0, 1}, 0), ({0, 1}, 2)]
            scores = [
                evaluate(lambda batch: torch.zeros(len(batch), 2), client.test.batches(8, 0), client.own_classes)
                for client in clients
            ]
            assert [score.accuracy for score in scores] == [None, 0.5]
            assert (scores[0] + scores[1]).accuracy == 0.5

    def test_must_have_a_training_image_of_each_of_their_classes(self) -> None:
        with pytest.raises(SplitError, match="Class cat has 2 training images, too few for its 2 clients"):
            make_indexed_clients(self.few(train=2, test=10), self.SHARES, 0)

    def test_cannot_all_be_without_test_images(self) -> None:
        with pytest.raises(SplitError, match="None of the 2 clients gets any held-out images"):
            make_indexed_clients(self.few(train=10, test=1), self.SHARES, 0)


def test_numbers_in_names_count_as_numbers() -> None:
    assert sorted(["s10", "s2", "a", "s2b1", "10", "9"], key=natural) == ["9", "10", "a", "s2", "s2b1", "s10"]


class TestShifts:
    IMAGES = torch.arange(12, dtype=torch.uint8).reshape(1, 1, 3, 4)

    @pytest.mark.parametrize("client", range(5))
    def test_turn_by_quarters(self, client: int) -> None:
        found = shifted(self.IMAGES, "rotated", client)
        assert torch.equal(found, torch.rot90(self.IMAGES, client % 4, (2, 3)))

    def test_invert_every_other_client(self) -> None:
        assert torch.equal(shifted(self.IMAGES, "inverted", 2), self.IMAGES)
        assert torch.equal(shifted(self.IMAGES, "inverted", 3), 255 - self.IMAGES)

    def test_are_of_training_and_test_images_alike_and_leave_labels_alone(self) -> None:
        image = known("digits").image
        images = open_set(DataSettings(name="digits", shift="inverted"), image, Path("unused"))
        shares = paper_shares(10, 5, 4, seed=0)
        kinds: tuple[Shift, Shift] = ("none", "inverted")
        plain, inverted = (make_indexed_clients(images, shares, 0, shift=shift) for shift in kinds)
        for part in ("train", "test"):
            for one, other, same in zip(plain, inverted, (True, False, True, False, True), strict=True):
                (x, y), (changed, labels) = (next(getattr(c, part).batches(4, seed=1)) for c in (one, other))
                assert torch.equal(y, labels)
                expected = x if same else -x  # digits are normalised to -1 … 1
                torch.testing.assert_close(changed, expected)
