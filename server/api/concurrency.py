"""How many requests of one kind a caller may have under way in this process."""

from collections import Counter
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

from server.core.errors import TooMany


class Concurrency:
    """Slots per key, such as a client's id. A limit of 0 means no limit. For use in the event loop only."""

    def __init__(self, limit: int, code: str, message: str, *, retry_after_s: int = 5) -> None:
        self._limit, self._code, self._message, self._retry_after_s = limit, code, message, retry_after_s
        self._held: Counter[Hashable] = Counter()

    @asynccontextmanager
    async def hold(self, key: Hashable) -> AsyncIterator[None]:
        """Occupy a slot; raises TooMany with the code and message when all of them are taken."""
        if self._limit and self._held[key] >= self._limit:
            raise TooMany(self._code, self._message, retry_after_s=self._retry_after_s)
        self._held[key] += 1
        try:
            yield
        finally:
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
