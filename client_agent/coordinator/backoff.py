"""Pauses between attempts: growing, bounded, and cut short when the agent stops."""

import random
import threading

from client_agent.errors import StopRequested

MAX_RETRY_AFTER_S = 300.0  # longest pause that a Retry-After header can impose


class Backoff:
    """Pauses between attempts, doubling up to a limit."""

    def __init__(self, stopping: threading.Event, first_s: float, longest_s: float) -> None:
        self._stopping, self._first_s, self._longest_s = stopping, first_s, longest_s
        self._next_s = first_s

    def reset(self) -> None:
        """Start over with the shortest pause."""
        self._next_s = self._first_s

    def next_pause_s(self, retry_after: str = "") -> float:
        """Return the next pause, or the one in a Retry-After header, up to MAX_RETRY_AFTER_S."""
        own_s = self._next_s * random.uniform(0.5, 1.5)  # noqa: S311 - jitter
        self._next_s = min(self._next_s * 2, self._longest_s)
        if retry_after.isascii() and retry_after.isdigit():
            return min(max(float(retry_after), 1.0), MAX_RETRY_AFTER_S)
        return own_s

    def wait(self, pause_s: float) -> None:
        """Sleep; raise StopRequested as soon as the agent is asked to stop."""
        if self._stopping.wait(pause_s):
            raise StopRequested
