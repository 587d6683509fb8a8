"""How commands print."""

from rich.console import Console

out = Console(soft_wrap=True)
