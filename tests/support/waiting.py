"""Waiting for another thread or process."""

import time
from collections.abc import Callable


def eventually(check: Callable[[], bool], timeout_s: float = 60) -> None:
    """Repeat the check until it is true, slowly enough to stay below rate limits; fail after the timeout."""
    give_up_at = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < give_up_at, f"the check was still false after {timeout_s:g} s"
        time.sleep(0.05)
