from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from lab.datasets.clients import Shift, shifted
from lab.datasets.scanners import Scanner
from shared.contract.errors import SplitError

SHIFTS: tuple[Shift, ...] = ("none", "rotated", "inverted")


@pytest.mark.parametrize(
    ("shift", "names"),
    [
        ("none", ["plain"] * 5),
        ("inverted", ["plain", "inverted", "plain", "inverted", "plain"]),
        ("rotated", ["plain", "90°", "180°", "270°", "plain"]),
    ],
)
def test_name_says_what_happens_to_images(shift: Shift, names: list[str]) -> None:
    assert [Scanner(shift, number).name for number in range(5)] == names


def test_inverting_turns_white_into_black_and_keeps_color_channels() -> None:
    pixels = torch.tensor([1.0, 0.0, 0.2])[:, None, None].expand(3, 2, 4)
    assert Scanner("inverted", 1).scan(pixels)[0, 0].tolist() == [0, 255, 204]
    assert Scanner("inverted", 2).scan(pixels)[0, 0].tolist() == [255, 0, 51]


def test_rotating_turns_counterclockwise() -> None:
    pixels = torch.tensor([[[0, 1], [2, 3], [4, 5]]]) / 255
    assert Scanner("rotated", 1).scan(pixels).tolist() == [[1, 3, 5], [0, 2, 4]]


@given(
    arrays(np.uint8, st.tuples(st.sampled_from([1, 3]), st.integers(1, 5), st.integers(1, 5))),
    st.sampled_from(SHIFTS),
    st.integers(0, 7),
)
def test_files_show_what_simulated_clients_see(image: np.ndarray, shift: Shift, number: int) -> None:
    original = torch.from_numpy(image)
    found = torch.from_numpy(np.array(Scanner(shift, number).scan(original.float() / 255)))
    expected = shifted(original[None], shift, number)[0].permute(1, 2, 0)
    assert torch.equal(found.reshape(expected.shape), expected)


def test_deep_images_stay_deep(tmp_path: Path) -> None:
    original = np.array([[0, 1000, 65535]], np.uint16)
    Image.fromarray(original).save(tmp_path / "deep.png")
    assert Scanner("inverted", 1).scan(tmp_path / "deep.png").tolist() == [[65535, 64535, 0]]
    assert Scanner("rotated", 1).scan(tmp_path / "deep.png").tolist() == [[65535], [1000], [0]]
    Image.fromarray(np.array([[0.0, 0.5, 2.0]], np.float32)).save(tmp_path / "float.tif")
    assert Scanner("inverted", 1).scan(tmp_path / "float.tif").tolist() == [[65535, 32767, 0]]


def test_transparency_becomes_black_before_inverting(tmp_path: Path) -> None:
    Image.new("RGBA", (1, 1), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    assert Scanner("inverted", 1).scan(tmp_path / "clear.png").tolist() == [[[255, 255, 255]]]


def test_file_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    with pytest.raises(SplitError) as caught:
        Scanner("inverted", 1).scan(broken)
    assert str(broken) in caught.value.message
    assert caught.value.next_step == "Fix or remove the file, or use --shift none."
