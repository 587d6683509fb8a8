"""The console that commands print to."""

from rich.console import Console

out = Console(soft_wrap=True)
