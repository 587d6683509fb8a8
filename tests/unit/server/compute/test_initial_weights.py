import hashlib
import io
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torchvision.models
from support.halves import server_half
from support.tensors import assert_same_tensors
from torch import Tensor

from server.compute import initial_weights
from server.compute.initial_weights import load_pretrained
from shared.contract.errors import WeightsError
from shared.contract.plan import FederationPlan, validate_plan

RESNET18 = torchvision.models.ResNet18_Weights.IMAGENET1K_V1


def make_plan(weights: str, backbone: str = "resnet18", method: str = "distrans") -> FederationPlan:
    return validate_plan(
        {
            "name": "test",
            "classes": ["a", "b"],
            "model": {"backbone": backbone, "weights": weights},
            "method": {"name": method},
        }
    )


@pytest.fixture(scope="module")
def checkpoint() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return torchvision.models.resnet18(weights=None).state_dict()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """torch.hub's checkpoint folder, empty."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    folder = tmp_path / "torch" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class TestChoice:
    def test_random_weights_load_nothing(self) -> None:
        assert load_pretrained(make_plan("random")) is None

    def test_file_is_refused_when_the_plan_does_not_use_one(self, tmp_path: Path) -> None:
        with pytest.raises(WeightsError, match="does not take a weights file"):
            load_pretrained(make_plan("random"), tmp_path / "a.pth")

    def test_missing_file_option_is_refused(self) -> None:
        with pytest.raises(WeightsError, match=r"model.weights = 'file' needs a weights file"):
            load_pretrained(make_plan("file"))


class TestFile:
    @pytest.mark.parametrize("name", ["a.pth", "a.safetensors"])
    def test_pth_and_safetensors_are_read(self, tmp_path: Path, name: str) -> None:
        tensors = {"w": torch.arange(3.0)}
        file = tmp_path / name
        file.write_bytes(saved(tensors) if name == "a.pth" else safetensors.torch.save(tensors))
        assert_same_tensors(load_pretrained(make_plan("file"), file), tensors)

    def test_that_is_absent_is_refused_with_its_path(self, tmp_path: Path) -> None:
        with pytest.raises(WeightsError, match=r"Cannot read .*none\.pth: No such file or directory"):
            load_pretrained(make_plan("file"), tmp_path / "none.pth")

    def test_that_is_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(WeightsError, match=r"Cannot read .*: Is a directory"):
            load_pretrained(make_plan("file"), tmp_path)

    def test_that_is_garbage_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.pth").write_bytes(b"garbage")
        with pytest.raises(WeightsError, match=r"a\.pth cannot be read as a file of tensors"):
            load_pretrained(make_plan("file"), tmp_path / "a.pth")

    def test_that_is_too_large_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(initial_weights, "MAX_FILE_BYTES", 1000)
        (tmp_path / "a.pth").write_bytes(bytes(1001))
        with pytest.raises(WeightsError, match="is larger than 1000 bytes"):
            load_pretrained(make_plan("file"), tmp_path / "a.pth")


class TestImageNet:
    def test_weights_load_from_the_local_cache(self, cache: Path, checkpoint: dict[str, Tensor]) -> None:
        (cache / Path(RESNET18.url).name).write_bytes(saved(checkpoint))
        assert_same_tensors(load_pretrained(make_plan("imagenet")), checkpoint)

    def test_downloaded_weights_are_verified_and_loaded(
        self, cache: Path, tmp_path: Path, checkpoint: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The file name contains the hash that the download is checked against."""
        data = saved(checkpoint)
        source = tmp_path / f"resnet18-{hashlib.sha256(data).hexdigest()[:8]}.pth"
        source.write_bytes(data)
        monkeypatch.setattr(RESNET18.value, "url", source.as_uri())
        assert_same_tensors(load_pretrained(make_plan("imagenet")), checkpoint)
        assert (cache / source.name).read_bytes() == data

    def test_tampered_download_is_refused(
        self, cache: Path, tmp_path: Path, checkpoint: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = tmp_path / "resnet18-00000000.pth"
        source.write_bytes(saved(checkpoint))
        monkeypatch.setattr(RESNET18.value, "url", source.as_uri())
        with pytest.raises(WeightsError, match="invalid hash value") as caught:
            load_pretrained(make_plan("imagenet"))
        assert source.as_uri() in str(caught.value)
        assert list(cache.iterdir()) == []

    def test_without_a_network(self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        absent = (tmp_path / "resnet18-f37072fd.pth").as_uri()
        monkeypatch.setattr(RESNET18.value, "url", absent)
        with pytest.raises(WeightsError, match="Cannot load the ImageNet weights of resnet18") as caught:
            load_pretrained(make_plan("imagenet"))
        assert caught.value.next_step == (
            f"Download {absent} on another machine and copy it to {cache}, or use model.weights = 'random'."
        )

    @pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04" + bytes(50), saved([1, 2]), saved({})[:-30]])
    def test_broken_cached_file_is_refused(self, cache: Path, content: bytes) -> None:
        (cache / Path(RESNET18.url).name).write_bytes(content)
        with pytest.raises(WeightsError, match="Cannot load") as caught:
            load_pretrained(make_plan("imagenet"))
        assert RESNET18.url in str(caught.value)
        assert "weights_only" not in str(caught.value)  # torch's hint to disable the protection

    @pytest.mark.parametrize("backbone", ["alexnet", "resnet18", "resnet50"])
    def test_the_set_that_pretrained_true_meant(self, backbone: str, cache: Path) -> None:
        weights = torchvision.models.get_model_weights(backbone).IMAGENET1K_V1
        (cache / Path(weights.url).name).write_bytes(saved({"w": torch.ones(1)}))
        assert_same_tensors(load_pretrained(make_plan("imagenet", backbone)), {"w": torch.ones(1)})

    def test_both_methods_start_from_them(self, cache: Path, checkpoint: dict[str, Tensor]) -> None:
        (cache / Path(RESNET18.url).name).write_bytes(saved(checkpoint))
        for method in ("distrans", "fedavg"):
            plan = make_plan("imagenet", method=method)
            state = server_half(plan).initial_state(load_pretrained(plan)).shared
            found = {name.removeprefix("backbone."): value for name, value in state.items()}
            assert all(torch.equal(found[name], checkpoint[name]) for name in checkpoint if not name.startswith("fc."))
