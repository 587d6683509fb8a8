"""`distrans-lab bench train`: its baseline, its measurements and what it computes from them."""

import io
import json
import tempfile
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lab.bench.train import TrainOptions, make_plan, run_bench, write_images
from lab.bench.train_report import TrainSpeed
from lab.bench.written_loop import PlainDouble, WrittenLoop
from shared.contract.errors import DistransError
from shared.contract.plan import BUILT_IN_BACKBONES
from shared.learning.model import build_double


def test_passes_measured_together_are_compared() -> None:
    """The machine is ten times slower in the second half; the ratio is still that of most pairs."""
    seconds = {"written": [2.0] * 3 + [20.0] * 2, "joint": [1.0] * 3 + [10.0] * 2, "alternating": [4.0] * 5}
    speed = TrainSpeed("lenet", 1, 100, seconds)
    assert speed.ratio("joint") == 2
    assert speed.ratio("alternating") == 0.5
    assert speed.images_per_second("joint") == 100


@pytest.mark.parametrize("backbone", BUILT_IN_BACKBONES)
def test_baseline_computes_what_the_double_channel_model_does(backbone: str) -> None:
    plan = make_plan(backbone)
    ours, plain = build_double(plan, 0.3).eval(), PlainDouble(plan)
    weights = ours.state_dict()
    assert [value.shape for value in plain.state_dict().values()] == [value.shape for value in weights.values()]
    plain.load_state_dict(dict(zip(plain.state_dict(), weights.values(), strict=True)))
    x, offset = torch.randn(2, *plan.image.shape), torch.randn(*plan.image.shape)
    with torch.no_grad():
        torch.testing.assert_close(plain.eval()(x, offset), ours(x, offset), rtol=1e-3, atol=1e-4)


def test_baseline_learns(tmp_path: Path) -> None:
    write_images(tmp_path, 40)
    loop = WrittenLoop(make_plan("lenet"), tmp_path / "train", torch.device("cpu"))
    losses = [loop.run()[0] for _ in range(8)]
    assert losses[-1] < losses[0]


def test_short_measurement_writes_all_outputs_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    threads, output = torch.get_num_threads(), io.StringIO()
    json_file, plot = tmp_path / "train.json", tmp_path / "train.png"
    options = TrainOptions(("lenet",), 1, 0, 32, 1, "cpu", json_file, plot)
    run_bench(Console(file=output, width=140), options)
    (row,) = [line.strip("│").split("│") for line in output.getvalue().splitlines() if line.startswith("│")]
    assert [cell.strip() for cell in row[:3]] == ["lenet", "1", "1"]
    content = json.loads(json_file.read_text())
    (network,) = content["networks"]
    assert content["machine"]["cores"] > 0
    assert {kind: len(seconds) for kind, seconds in network["seconds"].items()} == {
        "written": 1,
        "joint": 1,
        "alternating": 1,
    }
    assert network["ratios"]["joint"] == network["seconds"]["written"][0] / network["seconds"]["joint"][0]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert torch.get_num_threads() == threads
    assert not list(scratch.iterdir())


def test_other_networks_are_refused_before_measuring() -> None:
    with pytest.raises(DistransError, match="no written-out loop for 'mine:net'"):
        run_bench(Console(file=io.StringIO()), TrainOptions(("lenet", "mine:net")))
