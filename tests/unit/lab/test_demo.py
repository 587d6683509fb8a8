"""The parts of the demo that need no process; tests/e2e/test_command_lines.py runs it whole."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lab.demo_display import RunningSite, _live_table
from lab.demo_folder import claim
from lab.demo_plan import DemoOptions, plan_text, read_plan
from lab.splitting import SiteFolder
from shared.plan import BUILT_IN_BACKBONES, parse_plan
from shared.problems import DistransError


def options(**changes: Any) -> DemoOptions:
    defaults = {
        "folder": Path("demo-run"),
        "clients": 5,
        "rounds": 12,
        "dh": 0.6,
        "method": "distrans",
        "backbone": "lenet",
        "data": "sklearn:digits",
        "seed": 0,
        "plan": None,
        "keep": False,
    }
    return DemoOptions(**defaults | changes)


class TestFolder:
    def test_a_new_one(self, tmp_path: Path) -> None:
        with claim(tmp_path / "new" / "one") as folder:
            assert folder == tmp_path / "new" / "one"

    def test_what_an_earlier_demo_left_is_removed(self, tmp_path: Path) -> None:
        with claim(tmp_path) as folder:
            (folder / "plan.toml").touch()
            (folder / "logs").mkdir()
        with claim(tmp_path) as folder:
            assert [path.name for path in folder.iterdir()] == [".distrans-demo"]

    def test_a_foreign_one_is_left_as_it_is(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").touch()
        with pytest.raises(DistransError, match="not empty and not a demo's"), claim(tmp_path):
            pass
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    def test_a_file_is_no_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(DistransError, match="cannot be used: File exists"), claim(tmp_path / "file"):
            pass

    def test_only_one_demo_runs_in_it(self, tmp_path: Path) -> None:
        with claim(tmp_path) as folder:
            (folder / "plan.toml").touch()
            with pytest.raises(DistransError, match="Another demo is running"), claim(tmp_path):
                pass
            assert (folder / "plan.toml").exists()


class TestPlan:
    @pytest.mark.parametrize("backbone", BUILT_IN_BACKBONES)
    @pytest.mark.parametrize("method", ["distrans", "fedavg"])
    def test_it_is_what_was_asked_for(self, backbone: str, method: str) -> None:
        plan = parse_plan(plan_text(options(backbone=backbone, method=method, seed=7), ("cat", "dog")))
        assert (plan.model.backbone, plan.method.name, plan.seed) == (backbone, method, 7)
        assert (plan.rounds.count, plan.rounds.min_clients) == (12, 5)
        assert plan.classes == ("cat", "dog")

    def test_class_names_with_quotes(self) -> None:
        names = ('5" disk', "back\\slash", "Krähe")
        assert parse_plan(plan_text(options(), names)).classes == names

    def test_a_plan_of_ones_own(self, tmp_path: Path) -> None:
        file = tmp_path / "plan.toml"
        file.write_text(plan_text(options(rounds=3), ("cat", "dog")))
        text, plan = read_plan(file, 5, ("cat",))
        assert (text, plan.rounds.count) == (file.read_text(), 3)
        with pytest.raises(DistransError, match="waits for 5 clients, and there are 4"):
            read_plan(file, 4, ("cat",))
        with pytest.raises(DistransError, match="cow, hen are missing"):
            read_plan(file, 5, ("cow", "cat", "hen"))
        with pytest.raises(DistransError, match="cannot be read: No such file"):
            read_plan(tmp_path / "other.toml", 5, ("cat",))


def test_the_live_table_fits_a_small_terminal() -> None:
    site = RunningSite(SiteFolder("site-001", Path("x"), ("bird", "cat", "deer", "dog", "frog"), 10), "http://x")
    info = {
        "agent": {"doing": "downloading model 12"},
        "history": [{"with_offset": 0.9}],
        "bytes": {"sent": 12e6, "received": 3e6},
    }
    round_ = {"number": 12, "updates": 3, "participants": 5}
    reports = {"site-001": {"loss": 0.25, "samples": 300, "seconds": 0.1}}
    table = _live_table({"round": round_, "rounds_total": 100}, reports, [(site, info)])
    console = Console(width=80, record=True)
    with console.capture() as capture:
        console.print(table)
    shown = capture.get()
    assert "round 12 of 100 · 3 of 5 updates are in" in shown
    row = next(line for line in shown.splitlines() if "site-001" in line)
    assert " ".join(row.split()) == "site-001 bird cat … downloading model 12 0.250 90.0% 3000 15.0 MB"
