"""`distrans-lab run` and `report`."""

import sys
from pathlib import Path

import pytest
from support.experiments import TEXT
from typer.testing import CliRunner

from lab.__main__ import app, main


def test_system_error_is_one_line(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "afile").touch()
    monkeypatch.setattr(sys, "argv", ["distrans-lab", "run", str(file), "--out", str(tmp_path / "afile")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {tmp_path}/afile/cells: Not a directory. Check the path, or ")
    assert printed.count("\n") == 1


def test_runs_and_reports_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["run", "table7", "--scale", "small"]).exit_code == 0
    shown = CliRunner().invoke(app, ["report", "paper/table7.toml"])  # the only existing scale
    assert shown.exit_code == 0
    assert "| resnet18 | 44,765,128 | 44,785,608 |" in shown.output


def test_failed_federation_gives_an_error_code(tmp_path: Path) -> None:
    file = tmp_path / "try.toml"
    file.write_text(TEXT.replace("FIGURE", "none").replace("lr = 0.1", "lr = 90"))
    arguments = ["run", str(file), "--out", str(tmp_path / "out"), "--only", "method=FedAvg", "--only", "seed=0"]
    answer = CliRunner().invoke(app, [*arguments, "--device", "cpu"])
    assert answer.exit_code == 1
    assert "diverged" in answer.output
    assert answer.exception is None or isinstance(answer.exception, SystemExit)


def test_unknown_engine_or_scale_is_refused(tmp_path: Path) -> None:
    for option in ("--engine", "--scale"):
        answer = CliRunner().invoke(app, ["run", "table7", option, "gpu", "--out", str(tmp_path / "out")])
        assert answer.exit_code == 2
        assert "'gpu' is not one of" in answer.output
    assert not (tmp_path / "out").exists()
