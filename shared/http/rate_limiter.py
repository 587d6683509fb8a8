"""Rates of requests or attempts per caller."""

import math
import time
from collections import OrderedDict

MAX_KEYS = 10_000  # the most recent callers to remember
_BURST_S = 10.0  # this many seconds' worth of requests may arrive at once


class RateLimiter:
    """A token bucket per key: `per_s` requests per second, up to `burst` at once. A rate of 0 means no limit."""

    def __init__(self, per_s: float, burst: float | None = None) -> None:
        self.per_s = per_s
        self._burst = max(1.0, per_s * _BURST_S if burst is None else burst)
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()  # requests still counted, and since when

    def wait_s(self, key: str) -> int:
        """Return the seconds until this key may make a request; 0 means now."""
        if not self.per_s:
            return 0
        over = self._count(key) + 1 - self._burst
        return max(1, math.ceil(over / self.per_s)) if over > 0 else 0

    def spend(self, key: str) -> int:
        """Count a request if it is allowed now; return the seconds to wait otherwise."""
        wait_s = self.wait_s(key)
        if self.per_s and not wait_s:
            self._spent[key] = (self._count(key) + 1, time.monotonic())
            self._spent.move_to_end(key)
            if len(self._spent) > MAX_KEYS:
                self._spent.popitem(last=False)
        return wait_s

    def _count(self, key: str) -> float:
        spent, since = self._spent.get(key, (0.0, 0.0))
        return max(0.0, spent - (time.monotonic() - since) * self.per_s)
