"""Tables and help of the three command lines."""

import sys

import pytest
import typer
from rich.table import Table

from shared.system.command_line import print_table, run


def test_tables_are_not_truncated_when_piped(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("client", "trouble")
    table.add_row("north", "x" * 500)
    print_table(table)
    assert "x" * 500 in capsys.readouterr().out


def test_flags_in_help_have_no_type(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    app, group = typer.Typer(), typer.Typer()
    app.add_typer(group, name="noun")

    @group.command()
    def verb(fast: bool = typer.Option(False, "--fast", help="Run fast.")) -> None: ...

    @group.command()
    def other() -> None: ...

    monkeypatch.setattr(sys, "argv", ["program", "noun", "verb", "--help"])
    with pytest.raises(SystemExit):
        run(app)
    assert "  --fast  Run fast.\n" in capsys.readouterr().out
