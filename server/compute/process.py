"""Runs calls in the torch process: starts it when needed, replaces it if it dies, and ends it when it is idle."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

from server.compute import calls
from server.compute.calls import Reply, Request
from server.compute.frames import Disconnected, receive, send
from shared.contract import errors
from shared.contract.errors import DistransError

logger = logging.getLogger(__name__)
IDLE_S = 60.0  # without calls until a process ends that holds a state, for which more calls are likely
_IDLE_WITHOUT_STATE_S = 2.0
_SILENCE_S = 3600.0  # the longest computation, for a hypernetwork of gigabytes and many clients, takes far less
_ATTEMPTS = 2
_SECRETS = ("DISTRANS_ADMIN_TOKEN", "DISTRANS_SCRAPE_TOKEN", "DISTRANS_DB", "DISTRANS_DB_PASSWORD")
# With this process's own path, so that both run the same code.
_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from server.compute.worker import run; run()"


class TorchFailed(DistransError):
    """A computation with torch failed, or its process died twice."""

    code = "computation-failed"


class TorchMissing(DistransError):
    """torch is not installed on the coordinator's machine."""

    code = "torch-missing"


class TorchProcess:
    """One process with torch, for one call at a time."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._timer: threading.Timer | None = None
        self._owner = os.getpid()

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is none."""
        child = self._child
        return child.pid if child else None

    def run(self, request: Request) -> Reply:
        """Run a call and return its reply. If the process dies, repeat the call once in another one."""
        with self._lock:
            self._forget_parents_child()
            if self._timer is not None:
                self._timer.cancel()
            try:
                return self._run(request)
            finally:
                idle_s = self._idle_s if request.held else min(self._idle_s, _IDLE_WITHOUT_STATE_S)
                self._timer = threading.Timer(idle_s, self.close)
                self._timer.daemon = True
                self._timer.start()

    def _run(self, request: Request) -> Reply:
        reason = ""
        for _ in range(_ATTEMPTS):
            child = self._child = self._child or _Child()
            try:
                return child.run(request)
            except Disconnected as error:
                self._child = None
                reason = child.end(error)
                logger.warning("the torch process %d %s during %s", child.pid, reason, request.call)
            except BaseException as error:
                if not child.is_ready:  # something else broke off the exchange, such as a tensor that was not stored
                    self._child = None
                    child.end(error)
                raise
        raise TorchFailed(
            f"The process that computes {request.call!r} {reason}, {_ATTEMPTS} times.",
            next_step="Check the coordinator's memory and log.",
        )

    def close(self) -> None:
        """End the process once its call is over; the next call starts another one."""
        with self._lock:
            self._forget_parents_child()
            if self._timer is not None:
                self._timer.cancel()
            if self._child is not None:
                self._child.end(None)
                self._child = None

    def _forget_parents_child(self) -> None:
        """After a fork, leave the process to the parent, whose line it is on."""
        if self._owner != os.getpid():
            self._owner, self._child, self._timer = os.getpid(), None, None


class _Child:
    """A running process and the line to it."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair()
        self._line.settimeout(_SILENCE_S)
        self._held = ""
        self.is_ready = True  # the last exchange was completed
        environment = {name: value for name, value in os.environ.items() if name not in _SECRETS}
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own program, without input from outside
                [sys.executable, "-P", "-c", _PROGRAM, *sys.path], stdin=theirs.fileno(), env=environment
            )
        self.pid = self._process.pid

    def run(self, request: Request) -> Reply:
        key = request.held.key if request.held else ""
        tensors = request.held.load() if request.held and key != self._held else {}
        self.is_ready = False
        send(self._line, {"call": request.call, "arguments": request.arguments, "held": key})
        if key != self._held:
            send(self._line, {}, tensors)
            self._held = key
        for client, tensors in request.uploads:
            send(self._line, {"client": calls.dump_client(client), "is_last": False}, tensors)
        send(self._line, {"is_last": True})
        message, _ = receive(self._line)
        sets = [receive(self._line)[1] for _ in range(message.get("sets", 0))]
        self.is_ready = True
        if "error" in message:
            raise _error(message["error"])
        return Reply(message["result"], list(sets))

    def end(self, error: BaseException | None) -> str:
        """End the process and return how it ended."""
        self._line.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1 if error is not None else 10)
        self._process.kill()
        code = self._process.wait()
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with code {code}" if code else f"ended ({error})"


def _error(found: dict[str, str]) -> DistransError:
    kind, message = found["kind"], found["message"]
    if kind == "missing":
        return TorchMissing(
            f"This needs {message}, which is not installed on the coordinator's machine.",
            next_step="Run: pip install torch torchvision",
        )
    if kind == "unexpected":
        return TorchFailed(message)
    known: type[DistransError] = getattr(errors, kind)
    return known(message.removesuffix(f" {found['next_step']}"), next_step=found["next_step"])
