"""A site's data in every accepted form."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from client_agent.data.class_map import read_class_map, suggest_classes
from client_agent.data.dataset import load_item, open_data
from client_agent.data.splits import Item
from client_agent.errors import DataError
from client_agent.settings import SkippedData
from shared.contract.plan import FederationPlan, ImagePlan, validate_plan


def plan(*classes: str, **image: object) -> FederationPlan:
    return validate_plan(
        {
            "name": "pets",
            "classes": classes or ("cat", "dog", "eel"),
            "image": {"channels": 1, "height": 14, "width": 14, **image},
        }
    )


def draw(file: Path, value: int = 100) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (16, 16), value).save(file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for label, value in (("dog", 200), ("cat", 50)):
        for number in range(10):
            draw(tmp_path / "data" / label / f"{number}.png", value + number)
    return tmp_path / "data"


def test_one_folder_per_class_is_split_by_class_and_seed(folder: Path) -> None:
    data = open_data(str(folder), plan())
    assert data.report.class_counts == {"cat": 8, "dog": 8, "eel": 0}
    assert data.report.test_counts == {"cat": 2, "dog": 2, "eel": 0}
    again = open_data(str(folder), plan())
    first, second = (list(one.test.batches(10, 0)) for one in (data, again))
    assert torch.equal(first[0][0], second[0][0])
    other = open_data(str(folder), validate_plan(plan().model_dump() | {"seed": 5}))
    assert not torch.equal(first[0][0].sort(dim=0)[0], next(other.test.batches(10, 0))[0].sort(dim=0)[0])


def test_existing_train_and_test_folders_are_used_unchanged(tmp_path: Path) -> None:
    draw(tmp_path / "train" / "cat" / "a.png")
    draw(tmp_path / "train" / "cat" / "deeper" / "b.png")
    draw(tmp_path / "test" / "dog" / "c.png")
    report = open_data(str(tmp_path), plan()).report
    assert (report.class_counts["cat"], report.test_counts["dog"], report.test_counts["cat"]) == (2, 1, 0)


def test_classes_map_by_name_not_by_position(folder: Path) -> None:
    data = open_data(str(folder), plan("eel", "dog", "cat"))
    for images, labels in data.train.batches(4, seed=1):
        bright = images.mean(dim=(1, 2, 3)) > 0
        assert torch.equal(bright, labels == 1)


def test_csv_rows_are_split_by_their_split_column(tmp_path: Path) -> None:
    for number in range(4):
        draw(tmp_path / "images" / f"{number}.png")
    with (tmp_path / "list.csv").open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(["path", "label", "split"])
        writer.writerows([f"images/{n}.png", "cat", "test" if n == 3 else "train"] for n in range(4))
    report = open_data(str(tmp_path / "list.csv"), plan()).report
    assert (report.class_counts["cat"], report.test_counts["cat"]) == (3, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "columns path and label"),
        ("path,label\n,cat\n", "Line 2"),
        ("path,label,split\nx,cat,maybe\n", "maybe"),
    ],
)
def test_csv_errors_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        open_data(str(tmp_path / "list.csv"), plan())


def test_npz_labels_may_be_indices_or_names_and_images_gray_or_color(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    colour = generator.integers(0, 255, (10, 20, 20, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=colour, labels=np.array([0, 1] * 5))
    np.savez(
        tmp_path / "b.npz",
        x_train=colour.astype(np.float32) / 255,
        y_train=np.array(["cat", "dog"] * 5),
        x_test=colour[:2].astype(np.float32) / 255,
        y_test=np.array(["cat", "cat"]),
    )
    assert sum(open_data(str(tmp_path / "a.npz"), plan()).report.class_counts.values()) == 8
    report = open_data(str(tmp_path / "b.npz"), plan(channels=3)).report
    assert (report.class_counts["dog"], report.test_counts["cat"]) == (5, 2)


def test_npz_that_is_a_pickle_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=np.array([{"a": 1}], dtype=object), labels=np.array([0]))
    with pytest.raises(DataError, match="cannot be read"):
        open_data(str(tmp_path / "a.npz"), plan())


def test_sklearn_digits_are_split() -> None:
    report = open_data("sklearn:digits", plan(*map(str, range(10)))).report
    assert sum(report.class_counts.values()) + sum(report.test_counts.values()) == 1797


def test_a_missing_torchvision_dataset_is_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Download it there first"):
        open_data(f"torchvision:CIFAR10:{tmp_path}", plan())
    with pytest.raises(DataError, match="is not a torchvision dataset"):
        open_data("torchvision:Nothing", plan())


def test_custom_loader_function_is_called_and_its_errors_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_data_here.py").write_text(
        "import numpy as np\n"
        "def load():\n"
        "    return [(np.full((20, 20, 1), n, dtype=np.uint8), 'cat' if n % 2 else 'dog') for n in range(10)]\n"
        "def broken():\n    raise RuntimeError('no disk')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert sum(open_data("own_data_here:load", plan()).report.class_counts.values()) == 8
    with pytest.raises(DataError, match="no disk"):
        open_data("own_data_here:broken", plan())
    with pytest.raises(DataError, match="cannot be imported"):
        open_data("own_data_here:nothing", plan())


def test_all_problems_are_listed_and_can_be_skipped(folder: Path) -> None:
    draw(folder / "unicorn" / "a.png")
    (folder / "eel").mkdir()
    (folder / "cat" / "3.png").write_bytes(b"not an image")
    with pytest.raises(DataError) as caught:
        open_data(str(folder), plan(), check_files=True)
    for words in ("'unicorn' is not in the plan", "'eel' has no images", "3.png", "--skip-bad", "cat, dog, eel"):
        assert words in str(caught.value)
    report = open_data(str(folder), plan(), check_files=True, skip_bad=True).report
    assert len(report.problems) == 3
    assert sum(report.class_counts.values()) + sum(report.test_counts.values()) == 19


def test_source_without_usable_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data"):
        open_data(str(tmp_path / "nowhere"), plan())
    with pytest.raises(DataError, match="has no subfolders; create one per class"):
        open_data(str(tmp_path), plan())
    draw(tmp_path / "unicorn" / "a.png")
    with pytest.raises(DataError, match="has no training images of the plan's classes"):
        open_data(str(tmp_path), plan(), skip_bad=True)


@pytest.mark.parametrize("cached", [0, 3, 100])
def test_the_cache_never_changes_the_images(folder: Path, cached: int) -> None:
    image_bytes = 14 * 14 * 4
    whole = open_data(str(folder), plan())
    partly = open_data(str(folder), plan(), cache_bytes=cached * image_bytes)
    for _ in range(2):  # the second pass comes from the cache, if there is one
        for (a, la), (b, lb) in zip(whole.train.batches(3, 7), partly.train.batches(3, 7), strict=True):
            assert torch.equal(a, b)
            assert torch.equal(la, lb)


def test_each_image_is_decoded_once_as_far_as_the_cache_has_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[object] = []

    def count(item: Item, shape: ImagePlan) -> torch.Tensor:
        decoded.append(item)
        return load_item(item, shape)

    monkeypatch.setattr("client_agent.data.dataset.load_item", count)
    for cache_bytes, once, every_time in ((2**20, 16, 0), (14 * 14 * 4 * 10, 8, 8), (0, 0, 16)):
        data = open_data(str(folder), plan(), cache_bytes=cache_bytes)
        decoded.clear()
        for seed in range(3):
            assert sum(len(labels) for _, labels in data.train.batches(3, seed)) == 16
        assert len(decoded) == once + 3 * every_time
        assert data.train.uncached == every_time


def test_images_without_room_in_the_cache_are_named(folder: Path) -> None:
    assert open_data(str(folder), plan()).describe_cache() == ""
    data = open_data(str(folder), plan(), cache_bytes=14 * 14 * 4 * 10)  # 8 of 16 training and 2 of 4 held-out images
    assert data.describe_cache() == "10 of 20 images stay decoded in memory; the others are read in every pass"


def test_batches_from_the_cache_may_be_changed_by_their_user(folder: Path) -> None:
    data = open_data(str(folder), plan())
    first = [images.clone() for images, _ in data.train.batches(4, 0)]
    for images, _ in data.train.batches(4, 0):
        images.zero_()
    again = [images for images, _ in data.train.batches(4, 0)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_pass_can_be_abandoned_early(folder: Path) -> None:
    data = open_data(str(folder), plan(), cache_bytes=0)
    passing = data.train.batches(2, 0)
    next(passing)
    passing.close()
    assert sum(len(labels) for _, labels in data.train.batches(2, 0)) == 16


def test_an_unreadable_held_out_image_is_skipped_and_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(6):
        draw(tmp_path / "train" / "cat" / f"{number}.png")
        draw(tmp_path / "test" / "cat" / f"{number}.png")
    data = open_data(str(tmp_path), plan(), cache_bytes=0)
    broken, gone = tmp_path / "test" / "cat" / "2.png", tmp_path / "test" / "cat" / "4.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\nnothing more")
    gone.unlink()
    for _ in range(2):
        assert sum(len(labels) for _, labels in data.test.batches(3, 0)) == 4
    assert caplog.text.count("skipped an unreadable image") == 2
    assert "2 of 6 held-out images cannot be read, such as" in data.describe_unreadable()
    draw(broken)
    draw(gone)
    assert sum(len(labels) for _, labels in data.test.batches(3, 0)) == 6
    assert data.describe_unreadable() == ""


def test_a_few_unreadable_training_images_are_skipped_and_many_are_an_error(folder: Path) -> None:
    data = open_data(str(folder), plan(), cache_bytes=0)
    files = sorted(item for item in data.train._items if isinstance(item, Path))
    files[0].unlink()
    assert sum(len(labels) for _, labels in data.train.batches(4, 0)) == 15
    for file in files[1:4]:
        file.unlink()
    with pytest.raises(DataError, match="of 16 images cannot be read"):
        list(data.train.batches(4, 0))


def test_a_pass_without_any_readable_training_image_is_an_error(tmp_path: Path) -> None:
    draw(tmp_path / "train" / "cat" / "0.png")
    data = open_data(str(tmp_path), plan(), cache_bytes=0)
    (tmp_path / "train" / "cat" / "0.png").unlink()
    with pytest.raises(DataError, match="1 of 1 images cannot be read"):
        list(data.train.batches(4, 0))


class TestSkippedFiles:
    def broken(self, folder: Path) -> list[Path]:
        files = sorted((folder / "cat").glob("*.png"))[:4]
        for file in files:
            file.write_bytes(b"not an image")
        return files

    def test_they_stay_skipped_without_being_reported_again(self, folder: Path) -> None:
        files = self.broken(folder)
        draw(folder / "unicorn" / "a.png")
        checked = open_data(str(folder), plan(), check_files=True, skip_bad=True).report
        assert sorted(checked.skipped.files) == [str(file) for file in files]
        assert checked.skipped.classes == ("unicorn",)
        data = open_data(str(folder), plan(), skipped=checked.skipped)  # without skip_bad, as these are known
        assert data.report.problems == []
        assert (data.report.class_counts, data.report.test_counts) == (checked.class_counts, checked.test_counts)
        assert sum(len(labels) for _, labels in data.train.batches(4, 0)) == data.train.samples

    def test_pixels_in_memory_are_never_converted_to_text(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Printing a tensor takes milliseconds: minutes at every start for an .npz of 60,000 images."""
        np.savez(tmp_path / "a.npz", images=np.zeros((4, 8, 8), np.uint8), labels=np.array([0, 0, 1, 1]))
        monkeypatch.setattr(torch.Tensor, "__str__", lambda _tensor: pytest.fail("printed"))
        data = open_data(str(tmp_path / "a.npz"), plan(), skipped=SkippedData(files=("gone.png",)))
        assert data.train.samples == 2

    def test_a_repaired_file_is_used_again(self, folder: Path) -> None:
        files = self.broken(folder)
        skipped = open_data(str(folder), plan(), check_files=True, skip_bad=True).report.skipped
        draw(files[0])
        report = open_data(str(folder), plan(), skipped=skipped).report
        assert report.class_counts["cat"] + report.test_counts["cat"] == 7
        assert report.skipped.files == tuple(str(file) for file in files[1:])

    def test_a_class_that_appears_later_is_reported(self, folder: Path) -> None:
        draw(folder / "unicorn" / "a.png")
        skipped = open_data(str(folder), plan(), check_files=True, skip_bad=True).report.skipped
        draw(folder / "griffin" / "a.png")
        with pytest.raises(DataError, match="'griffin' is not in the plan"):
            open_data(str(folder), plan(), skipped=skipped)
        assert open_data(str(folder), plan(), skipped=skipped, skip_bad=True).report.problems == [
            "class 'griffin' is not in the plan"
        ]


class TestClassMaps:
    def test_several_names_may_map_to_one_class(self, folder: Path) -> None:
        report = open_data(str(folder), plan("animal", "eel"), class_map={"cat": "animal", "dog": "animal"}).report
        assert report.class_counts == {"animal": 16, "eel": 0}

    def test_a_map_to_an_unknown_class_is_refused(self, folder: Path) -> None:
        with pytest.raises(DataError, match=r"maps 'cat' to 'eels', which is not in the plan; did you mean 'eel'\?"):
            open_data(str(folder), plan(), class_map={"cat": "eels"})

    def test_a_mapped_name_missing_from_the_data_is_listed(self, folder: Path) -> None:
        with pytest.raises(DataError, match=r"names 'Dogg', which is not in the data; did you mean 'dog'\?"):
            open_data(str(folder), plan(), class_map={"Dogg": "dog"}, check_files=True)

    def test_a_class_that_the_data_already_contains_is_not_suggested(self, folder: Path) -> None:
        draw(folder / "cats" / "a.png")
        with pytest.raises(DataError) as caught:
            open_data(str(folder), plan())
        assert "class 'cats' is not in the plan\n" in str(caught.value)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("Tumors: tumor", "is not valid TOML"),
            ("Stage I = 'one'", "is not valid TOML"),
            ("a.b = 'one'", "no class for 'a'"),
            ("a = 1", "no class for 'a'"),
        ],
    )
    def test_an_invalid_class_map_is_explained(self, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "map.toml").write_text(text)
        with pytest.raises(DataError, match=message) as caught:
            read_class_map(tmp_path / "map.toml")
        assert '"name in the data" = "class in the plan"' in str(caught.value)
        with pytest.raises(DataError, match="No such file"):
            read_class_map(tmp_path / "gone.toml")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Tumors", "tumor"),
        ("TUMOR", "tumor"),
        ("Benign-Tissue", "benign tissue"),
        ("berries", "berry"),
        ("normal", None),
        ("???", None),
    ],
)
def test_a_near_match_is_suggested_for_an_unknown_class(name: str, meant: str | None) -> None:
    found = suggest_classes([name], ("tumor", "benign tissue", "berry"))[name]
    assert found == ("" if meant is None else f"; did you mean {meant!r}?")
