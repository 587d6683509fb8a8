"""Logits on the held-out images."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from support.digit_sites import PLAN, digits_data
from torch import Tensor

from client_agent.data.dataset import SiteData, open_data
from client_agent.serving.candidates import Base
from client_agent.serving.measurement import measure_bases


def brightness(images: Tensor) -> Tensor:
    return images.flatten(1).mean(dim=1, keepdim=True).expand(-1, 4)


def test_every_image_is_read_once_and_in_order() -> None:
    data = digits_data(test=70)
    found = measure_bases({Base.GLOBAL: brightness, Base.ALONE: lambda x: -brightness(x)}, data, seed=0)
    assert found is not None
    images = torch.cat([part for _, part, _ in data.test.in_order(200)])
    assert torch.equal(found.labels, data.test.labels)
    assert torch.equal(found.logits[Base.GLOBAL], brightness(images))
    assert torch.equal(found.logits[Base.ALONE], -brightness(images))
    assert (len(found.holdout.validation), len(found.holdout.test)) == (35, 35)


def test_without_held_out_images_nothing_is_measured() -> None:
    assert measure_bases({Base.GLOBAL: brightness}, digits_data(test=0), seed=0) is None


@pytest.mark.parametrize("base", [Base.ALONE, Base.ADAPTED])
def test_an_own_model_that_fails_is_left_out(base: Base, caplog: pytest.LogCaptureFixture) -> None:
    def broken(_images: Tensor) -> Tensor:
        raise RuntimeError("out of memory")

    for own in (broken, lambda images: brightness(images) / 0):
        found = measure_bases({Base.GLOBAL: brightness, base: own}, digits_data(), seed=0)
        assert found is not None
        assert list(found.logits) == [Base.GLOBAL]
    assert f"the {base} model cannot be measured: out of memory" in caplog.text


def test_a_failing_model_of_the_federation_is_an_error() -> None:
    def broken(_images: Tensor) -> Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        measure_bases({Base.GLOBAL: broken}, digits_data(), seed=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for label in ("0", "1"):
        for part, count in (("train", 2), ("test", 40)):
            (tmp_path / part / label).mkdir(parents=True)
            for number in range(count):
                Image.new("L", (16, 16), number).save(tmp_path / part / label / f"{number:02}.png")
    return tmp_path


def measure(data: SiteData) -> tuple[set[float], set[float]] | None:
    """Return the brightness of the images that choose and of those that test."""
    found = measure_bases({Base.GLOBAL: brightness}, data, seed=0)
    if found is None:
        return None
    logits, split = found.logits[Base.GLOBAL][:, 0] + 10 * found.labels, found.holdout
    return set(logits[split.validation].tolist()), set(logits[split.test].tolist())


def test_an_unreadable_image_does_not_change_the_role_of_the_others(folder: Path) -> None:
    data = open_data(str(folder), PLAN)
    whole = measure(data)
    (folder / "test" / "0" / "07.png").write_bytes(b"broken")
    (folder / "test" / "1" / "21.png").write_bytes(b"broken")
    partial = measure(open_data(str(folder), PLAN))
    assert whole is not None
    assert partial is not None
    assert len(whole[0] | whole[1]) == 80
    assert len(partial[0] | partial[1]) == 78
    assert partial[0] <= whole[0]
    assert partial[1] <= whole[1]


def test_too_many_unreadable_images_are_no_measurement(folder: Path) -> None:
    for number in range(9):
        (folder / "test" / "0" / f"{number:02}.png").write_bytes(b"broken")
    assert measure(open_data(str(folder), PLAN)) is None
