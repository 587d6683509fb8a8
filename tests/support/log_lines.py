"""Lines that something writes while a test waits for one of them."""

import re
import threading
from collections.abc import Callable


class LogLines:
    """What was written so far, in `lines`."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._news = threading.Condition()

    def add(self, line: str) -> None:
        """One more line."""
        with self._news:
            self.lines.append(line)
            self._news.notify_all()

    def wake(self) -> None:
        """Something else has changed that a waiting test may look at."""
        with self._news:
            self._news.notify_all()

    def wait_for(self, pattern: str, ended: Callable[[], bool], timeout_s: float) -> str:
        """The first group (or the whole) of the first line that matches; fails once no such line can come any more."""

        def found() -> re.Match[str] | None:
            return next((match for line in list(self.lines) if (match := re.search(pattern, line))), None)

        with self._news:
            self._news.wait_for(lambda: found() or ended(), timeout_s)
        match = found()
        assert match, f"no line like {pattern!r}:\n" + "\n".join(self.lines)
        return match[1] if match.re.groups else match[0]
