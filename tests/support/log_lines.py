"""Log lines that a test can wait for."""

import re
import threading


class LogLines:
    """Base class of anything that writes log lines, collected in `lines`."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._log_ended = False
        self._log_changed = threading.Condition()

    def _add_line(self, line: str) -> None:
        with self._log_changed:
            self.lines.append(line)
            self._log_changed.notify_all()

    def _end_log(self) -> None:
        with self._log_changed:
            self._log_ended = True
            self._log_changed.notify_all()

    def wait_for_line(self, pattern: str, timeout_s: float = 90) -> str:
        """Return the first group (or all) of the first match; fail at the end of the log or after the timeout."""

        def found() -> re.Match[str] | None:
            return next((match for line in self.lines if (match := re.search(pattern, line))), None)

        with self._log_changed:
            self._log_changed.wait_for(lambda: found() or self._log_ended, timeout_s)
            match = found()
        assert match, f"no line matches {pattern!r}:\n" + "\n".join(self.lines)
        return match[1] if match.re.groups else match[0]
