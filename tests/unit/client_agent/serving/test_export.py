"""Exported models: their content, and targets that cannot be written."""

import json
import stat
import zipfile
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from support.halves import server_half
from torchvision.transforms import v2 as transforms

from client_agent import __main__ as command_line
from client_agent.data.images import PREDICT_FORMATS, decode, to_tensor
from client_agent.serving.baseline import LocalBaseline
from client_agent.serving.candidates import Base, Candidate, Member, Mixed, single
from client_agent.serving.export import ABOUT, export_program, export_safetensors
from client_agent.serving.model import Recipe, build
from client_agent.settings import Identity
from client_agent.state.folder import StateFolder
from client_agent.state.kept_models import Bundle
from shared.contract.plan import validate_plan
from shared.http.client_connection import Connection
from shared.learning.methods.base import ClientRecord, RoundContext
from shared.learning.preprocessing import normalize
from shared.learning.runtime import Runtime

PLAN = validate_plan(
    {
        "name": "pets",
        "classes": ["cat", "dog"],
        "image": {"channels": 3, "height": 16, "width": 20, "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]},
        "method": {"offset_aggregation": "none", "alpha": 0.25},
    }
)


@pytest.fixture
def bundle() -> Bundle:
    half, me = server_half(PLAN), ClientRecord("north", (1, 1))
    state, facts = half.initial_state(), half.facts([me])
    offset = {"offset": torch.rand(PLAN.image.shape, generator=torch.Generator().manual_seed(1))}
    return Bundle(3, "a" * 64, state.shared, half.personal(state, me, RoundContext([me], facts)), offset, facts)


@pytest.fixture
def state(tmp_path: Path, bundle: Bundle) -> StateFolder:
    folder = StateFolder(tmp_path / "state")
    who = {"client_id": "1", "name": "north", "token": "t", "federation": "pets", "data": "sklearn:digits"}
    folder.create(Identity(plan=PLAN, connection=Connection(server="http://127.0.0.1:9"), **who))
    folder.models.save(bundle, keep=1)
    folder.models.pin(3)
    return folder


def test_the_description_is_enough_to_use_the_program(state: StateFolder, bundle: Bundle, tmp_path: Path) -> None:
    """With only the file, a program gets the same logits as the agent."""
    target = tmp_path / "model.pt2"
    model = build(PLAN, "north", bundle, Runtime())
    export_program(state.identity(), bundle, model, target)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    extra = {ABOUT: ""}
    program = torch.export.load(target, extra_files=extra).module()
    about = json.loads(extra[ABOUT])
    assert about["classes"] == ["cat", "dog"]
    assert about["normalization"] == {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4], "inside_program": True}
    assert (about["federation"], about["site"], about["round"]) == ("pets", "north", 3)
    assert about["offset"] == {"digest": model.offset_digest, "alpha": 0.25, "inside_program": True}
    photo = tmp_path / "photo.png"
    Image.effect_noise((33, 50), 80).convert("RGBA").save(photo)
    rule = about["input"]["resize"]
    assert rule["interpolation"] == "bilinear"
    picture = transforms.functional.pil_to_tensor(Image.open(photo).convert(about["input"]["mode"]))
    pixels = transforms.functional.resize(picture.float() / 255, rule["size"], antialias=rule["antialias"])
    expected = model.predict(to_tensor(decode(photo, PREDICT_FORMATS), PLAN.image)[None])
    torch.testing.assert_close(program(pixels[None]).softmax(dim=1), expected)


@pytest.mark.parametrize("mixed", ["probabilities", "logits"])
def test_a_blend_is_one_program_with_everything_inside(
    state: StateFolder, bundle: Bundle, tmp_path: Path, mixed: Mixed
) -> None:
    bundle.facts["class_totals"] = "10,90"
    weights = {"alone": LocalBaseline(PLAN, "north").start(), "adapted": bundle.shared}
    parts = ((Member(Base.ADAPTED, True), 0.5), (Member(Base.GLOBAL, True), 0.2), (Member(Base.ALONE), 0.3))
    recipe = Recipe(Candidate("blend", parts, mixed), 1.7, (30, 10), weights, "r" * 64)
    model = build(PLAN, "north", bundle, Runtime(), recipe)
    target = tmp_path / "blend.pt2"
    export_program(state.identity(), bundle, model, target)
    extra = {ABOUT: ""}
    program = torch.export.load(target, extra_files=extra).module()
    pixels = torch.rand(7, *PLAN.image.shape)
    expected = model.predict(normalize(pixels, PLAN.image.mean, PLAN.image.std))
    torch.testing.assert_close(program(pixels).softmax(dim=1), expected)
    assert json.loads(extra[ABOUT])["candidate"] == {
        "name": "blend",
        "digest": "r" * 64,
        "members": [
            {"base": "adapted", "weight": 0.5},
            {"base": "global", "weight": 0.2},
            {"base": "alone", "weight": 0.3},
        ],
        "mixed": mixed,
        "prior": "site",
        "only_own_classes": False,
        "temperature": 1.7,
        "inside_program": True,
    }
    assert json.loads(extra[ABOUT])["offset"]["digest"] == model.offset_digest
    export_safetensors(state.identity(), bundle, model, tmp_path / "blend.safetensors")
    with safe_open(tmp_path / "blend.safetensors", "pt") as file:
        kinds = {name.partition(".")[0] for name in file.keys()}  # noqa: SIM118 - not a dict
        assert json.loads(file.metadata()["candidate"])["temperature"] == 1.7
    assert kinds == {"model", "adapted", "alone", "offset"}


def test_the_sites_own_model_is_exported_without_an_offset(state: StateFolder, bundle: Bundle, tmp_path: Path) -> None:
    recipe = Recipe(single(Member(Base.ALONE)), weights={"alone": LocalBaseline(PLAN, "north").start()})
    model = build(PLAN, "north", bundle, Runtime(), recipe)
    export_program(state.identity(), bundle, model, tmp_path / "alone.pt2")
    extra = {ABOUT: ""}
    torch.export.load(tmp_path / "alone.pt2", extra_files=extra)
    assert json.loads(extra[ABOUT])["offset"] is None


def test_the_description_can_be_read_without_torch(state: StateFolder, bundle: Bundle, tmp_path: Path) -> None:
    export_program(state.identity(), bundle, build(PLAN, "north", bundle, Runtime()), tmp_path / "model.pt2")
    with zipfile.ZipFile(tmp_path / "model.pt2") as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(f"extra/{ABOUT}")]
        assert json.loads(archive.read(name))["classes"] == ["cat", "dog"]


@pytest.mark.parametrize("suffix", [".pt2", ".safetensors"])
def test_a_target_that_cannot_be_written_is_reported_in_one_line(
    state: StateFolder,
    tmp_path: Path,
    suffix: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / f"taken{suffix}").mkdir()
    for target, words in (
        (tmp_path / "nowhere" / f"model{suffix}", "nowhere is not a folder. Create it"),
        (tmp_path / f"taken{suffix}", "cannot be written: Is a directory. Use a path"),
        (tmp_path / "model.onnx", "must end in .safetensors or .pt2"),
    ):
        monkeypatch.setattr("sys.argv", ["distrans-agent", "export", str(target), "--state", str(state.path)])
        with pytest.raises(SystemExit) as ending:
            command_line.main()
        (line,) = capsys.readouterr().err.splitlines()
        assert ending.value.code == 1
        assert line.startswith("error: ")
        assert words in line
    assert {file.name for file in tmp_path.iterdir()} == {"state", f"taken{suffix}"}
