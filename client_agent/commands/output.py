"""How commands print."""

import sys

from rich.console import Console
from rich.table import Table

_ANY_WIDTH = 100_000
out = Console(soft_wrap=True)


def print_table(table: Table) -> None:
    """Folded to fit a terminal; whole, however wide, in a pipe or a file."""
    for column in table.columns:
        column.overflow = "fold"
    Console(markup=False, emoji=False, width=None if sys.stdout.isatty() else _ANY_WIDTH).print(table)
