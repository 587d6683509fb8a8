"""The parts of the demo that need no processes; tests/e2e/test_command_lines.py runs all of it."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lab.datasets.site_folders import SiteFolder
from lab.demo.display import RunningSite, _live_table
from lab.demo.folder import claim
from lab.demo.plan import DemoOptions, plan_text, read_plan
from shared.contract.errors import DistransError
from shared.contract.plan import BUILT_IN_BACKBONES, parse_plan


def options(**changes: Any) -> DemoOptions:
    defaults = {
        "folder": Path("demo-run"),
        "clients": 5,
        "rounds": 12,
        "dh": 0.6,
        "shift": "inverted",
        "images": 50,
        "method": "distrans",
        "backbone": "lenet",
        "data": "sklearn:digits",
        "seed": 0,
        "plan": None,
        "keep": False,
    }
    return DemoOptions(**defaults | changes)


class TestFolder:
    def test_missing_folder_is_created(self, tmp_path: Path) -> None:
        with claim(tmp_path / "new" / "one") as folder:
            assert folder == tmp_path / "new" / "one"

    def test_files_of_an_earlier_demo_are_removed(self, tmp_path: Path) -> None:
        with claim(tmp_path) as folder:
            (folder / "plan.toml").touch()
            (folder / "logs").mkdir()
        with claim(tmp_path) as folder:
            assert [path.name for path in folder.iterdir()] == [".distrans-demo"]

    def test_folder_with_other_files_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").touch()
        with pytest.raises(DistransError, match="not empty and not from a demo"), claim(tmp_path):
            pass
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    def test_file_in_place_of_the_folder_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(DistransError, match=r"Cannot use .*: File exists"), claim(tmp_path / "file"):
            pass

    def test_second_demo_in_the_same_folder_is_refused(self, tmp_path: Path) -> None:
        with claim(tmp_path) as folder:
            (folder / "plan.toml").touch()
            with pytest.raises(DistransError, match="Another demo is running"), claim(tmp_path):
                pass
            assert (folder / "plan.toml").exists()


class TestPlan:
    @pytest.mark.parametrize("backbone", BUILT_IN_BACKBONES)
    @pytest.mark.parametrize("method", ["distrans", "fedavg"])
    def test_generated_plan_has_the_requested_settings(self, backbone: str, method: str) -> None:
        plan = parse_plan(plan_text(options(backbone=backbone, method=method, seed=7), ("cat", "dog")))
        assert (plan.model.backbone, plan.method.name, plan.seed) == (backbone, method, 7)
        assert (plan.rounds.count, plan.rounds.min_clients) == (12, 5)
        assert plan.classes == ("cat", "dog")

    def test_generated_plan_trains_as_the_default_preset_does(self) -> None:
        plan = parse_plan(plan_text(options(), ("cat", "dog")))
        default = parse_plan('name = "x"\nclasses = ["cat", "dog"]')
        assert plan.method == default.method
        assert plan.training == default.training.model_copy(update={"batch_size": 16, "epochs": 4})

    def test_class_names_with_quotes_survive(self) -> None:
        names = ('5" disk', "back\\slash", "Krähe")
        assert parse_plan(plan_text(options(), names)).classes == names

    def test_custom_plan_is_checked_against_sites_and_classes(self, tmp_path: Path) -> None:
        file = tmp_path / "plan.toml"
        file.write_text(plan_text(options(rounds=3), ("cat", "dog")))
        text, plan = read_plan(file, 5, ("cat",))
        assert (text, plan.rounds.count) == (file.read_text(), 3)
        with pytest.raises(DistransError, match="waits for 5 clients, but there are only 4"):
            read_plan(file, 4, ("cat",))
        with pytest.raises(DistransError, match="lacks classes of the data: cow, hen"):
            read_plan(file, 5, ("cow", "cat", "hen"))
        with pytest.raises(DistransError, match=r"Cannot read .*: No such file"):
            read_plan(tmp_path / "other.toml", 5, ("cat",))


@pytest.mark.parametrize(
    ("doing", "shown"),
    [
        ("downloading model 12", "downloading model 12"),
        ("training this site's own model, round 12", "own model, round 12"),
        ("fine-tuning model 12 on this site's images", "fine-tuning model 12"),
    ],
)
def test_live_table_of_ten_sites_fits_a_small_terminal(doing: str, shown: str) -> None:
    classes = ("bird", "cat", "deer", "dog", "frog")
    info = {"agent": {"doing": doing}, "history": [{"test": 1.0}], "bytes": {"sent": 12e6, "received": 3e6}}
    sites = [
        (RunningSite(SiteFolder(f"site-{number:03}", Path("x"), classes, 10), "http://x"), info)
        for number in range(1, 11)
    ]
    round_ = {"number": 12, "updates": 3, "participants": 10}
    reports = {site.folder.name: {"loss": 0.25, "samples": 300, "seconds": 0.1} for site, _ in sites}
    table = _live_table({"round": round_, "rounds_total": 100}, reports, sites)
    console = Console(width=80, record=True)
    with console.capture() as capture:
        console.print(table)
    text = capture.get()
    assert "round 12 of 100 · 3 of 10 updates received" in text
    rows = [" ".join(line.split()) for line in text.splitlines() if "site-" in line]
    assert rows == [f"{site.folder.name} bird cat … {shown} 0.250 100.0% 3000 15.0 MB" for site, _ in sites]
