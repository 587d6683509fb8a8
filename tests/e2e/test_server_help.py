"""Help of `distrans-server`, and the example plan it prints."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from support.operator_commands import Succeed

from server import __main__ as program
from shared.contract.method_options import DistransOptions, GeneratorOptions
from shared.contract.plan import FederationPlan, ImagePlan, ModelPlan, RoundsPlan, TrainingPlan, parse_plan

GROUPS = (("db",), ("federation",), ("invite",), ("client",), ("audit",))


def all_commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command and group of commands."""
    found = typer.main.get_command(program.app) if group is None else group
    yield path
    for name, child in getattr(found, "commands", {}).items():
        yield from all_commands(child, (*path, name))


class TestHelp:
    def test_no_command_is_missing(self) -> None:
        assert {
            ("serve",),
            ("db", "backup"),
            ("db", "upgrade"),
            *(
                ("federation", verb)
                for verb in (
                    "create",
                    "list",
                    "show",
                    "start",
                    "pause",
                    "resume",
                    "cancel",
                    "rollback",
                    "export",
                    "import",
                    "delete",
                )
            ),
            *(("invite", verb) for verb in ("create", "list", "revoke")),
            *(("client", verb) for verb in ("list", "revoke", "rotate")),
            *(("audit", verb) for verb in ("list", "export")),
        } == {path for path in all_commands() if path and path not in GROUPS}

    @pytest.mark.parametrize("path", list(all_commands()), ids=" ".join)
    def test_every_command_explains_itself(self, succeed: Succeed, path: tuple[str, ...]) -> None:
        out = succeed(*path, "--help")
        assert re.search(rf"Usage: .*{' '.join(path)}", out)
        assert re.search(r"[A-Z][^\n]+\.", out)

    @pytest.mark.parametrize("path", list(all_commands()), ids=" ".join)
    def test_options_have_metavars_and_flags_have_none(self, succeed: Succeed, path: tuple[str, ...]) -> None:
        options = re.findall(r"^  (?:-h, )?(--\S+.*)$", succeed(*path, "--help"), re.MULTILINE)
        assert options
        assert not [
            option
            for option in options
            if re.search(r"<\w+|\b(TEXT|PATH|INTEGER|FLOAT|BOOLEAN)\b(?= +\S)", option)
            and not option.startswith(("--note TEXT", "--root-path PATH"))
        ]

    @pytest.mark.parametrize(
        "path", [("serve",), ("federation", "create"), ("federation", "show"), ("invite", "create")], ids=" ".join
    )
    def test_examples_follow_the_options(self, succeed: Succeed, path: tuple[str, ...]) -> None:
        examples = succeed(*path, "--help").partition("\n  Examples:\n")[2].splitlines()
        assert len(examples) > 1
        assert all(line.startswith(f"    distrans-server {' '.join(path)}") for line in examples)

    def test_help_creates_no_files(self, succeed: Succeed, tmp_path: Path) -> None:
        for path in all_commands():
            succeed(*path, "--help")
        assert list(tmp_path.iterdir()) == []


class TestExamplePlan:
    def test_example_plan_shows_the_defaults(self, succeed: Succeed) -> None:
        plan = parse_plan(succeed("federation", "create", "--example"))
        assert plan == FederationPlan(name="lung-nodules", classes=("benign", "malignant"))

    def test_example_plan_shows_every_setting(self, succeed: Succeed) -> None:
        example = succeed("federation", "create", "--example")
        tables = (ImagePlan, ModelPlan, DistransOptions, GeneratorOptions, TrainingPlan, RoundsPlan)
        keys = {name for table in tables for name in table.model_fields} - {"generator"}  # a table, not a key
        assert keys <= set(re.findall(r"^(?:# )?(\w+) = ", example, re.MULTILINE))

    def test_commented_lines_of_the_example_plan_are_valid(self, succeed: Succeed) -> None:
        example = succeed("federation", "create", "--example")
        uncommented, number = re.subn(r"^# (\w+ = )", r"\1", example, flags=re.MULTILINE)
        assert number >= 5
        plan, defaults = parse_plan(uncommented), FederationPlan(name="lung-nodules", classes=("benign", "malignant"))
        assert plan.model.dense_dim == 256
        assert plan.method == defaults.method.model_copy(update={"offset_lr": 0.05})

    def test_example_plan_works_with_another_preset(self, succeed: Succeed) -> None:
        example = succeed("federation", "create", "--example").replace('"offset-dropout"', '"paper"', 1)
        expected = FederationPlan(name="lung-nodules", classes=("benign", "malignant"), preset="paper")
        assert parse_plan(example) == expected

    def test_example_plan_can_be_created(self, succeed: Succeed, tmp_path: Path) -> None:
        (tmp_path / "plan.toml").write_text(succeed("federation", "create", "--example"))
        succeed("db", "upgrade")
        assert succeed("federation", "create", "plan.toml") == (
            "Created federation lung-nodules. Next: distrans-server invite create lung-nodules\n"
        )
