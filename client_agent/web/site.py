"""What the web service knows of the agent around it."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Site:
    """What the agent shows, and the only thing that its page may change."""

    info: Callable[[], dict[str, Any]]  # the body of /info
    version: Callable[[], Hashable] = lambda: None  # differs when `info` does, and costs next to nothing
    pin: Callable[[int | None], None] | None = None  # pins a kept model, or unpins; raises DistransError
