"""A cache for the parts of an answer that all clients of a federation share."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class _Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    known: tuple[Hashable, Any] | None = None  # the newest stage, and the value then


class AnswerCache:
    """One value per key, valid for one stage, such as a version. The least recently used keys are forgotten.

    Concurrent callers share one computation, so that a thousand agents woken together cost one. Errors are not cached.
    """

    def __init__(self, max_keys: int = 3000) -> None:
        self._max_keys = max_keys
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, stage: Hashable, compute: Callable[[], T]) -> T:
        """Return the value of the key at this stage; compute it unless it is known."""
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            if len(self._entries) > self._max_keys:
                self._entries.popitem(last=False)
        with entry.lock:
            if entry.known is None or entry.known[0] != stage:
                entry.known = stage, compute()
            value: T = entry.known[1]
            return value

    def peek(self, key: Hashable, stage: Hashable) -> Any | None:
        """Return the value of the key at this stage, or None if it is not known yet; never waits."""
        entry = self._entries.get(key)
        known = entry.known if entry is not None else None
        return known[1] if known is not None and known[0] == stage else None

    def forget(self, key: Hashable) -> None:
        """Compute the value of the key anew when it is next asked for."""
        with self._lock:
            self._entries.pop(key, None)
