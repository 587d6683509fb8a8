"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable


def eventually(check: Callable[[], bool], timeout_s: float = 60) -> None:
    """Look again and again, for a limited time; not so often that a rate limit answers."""
    give_up_at = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < give_up_at, "it has not happened"
        time.sleep(0.05)
