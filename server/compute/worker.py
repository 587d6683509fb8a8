"""The torch process: runs one call after the other for the coordinator that started it, and ends with it.

`run` is called in a new interpreter, with a socket to the coordinator as its standard input.
"""

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from server.compute import calls
from server.compute.frames import Disconnected, receive, send
from shared.contract import errors
from shared.contract.errors import DistransError
from shared.learning.methods.base import ClientRecord
from shared.tensors.arrays import Array, Arrays


def run() -> None:
    """Answer calls until the coordinator closes the line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the coordinator, which may need this process to finish
    line = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what users' modules print belongs in the log
    threading.Thread(target=_end_with, args=(line,), daemon=True).start()
    key, held = "", Arrays()
    try:
        while True:
            message, _ = receive(line)
            if message["held"] != key:
                key, held = "", {}  # before the next ones arrive: they may be large
                held = receive(line)[1]
                key = message["held"]
            _answer(line, message, held)
    except Disconnected:
        return


def _end_with(coordinator: socket.socket) -> None:
    """End this process when the coordinator has ended, even in the middle of a call."""
    poll = select.poll()
    poll.register(coordinator, 0)  # only for its end
    poll.poll()
    os._exit(0)


def _answer(line: socket.socket, message: Mapping[str, Any], held: Mapping[str, Array]) -> None:
    uploads = _uploads(line)
    try:
        reply = calls.run(message["call"], message["arguments"], held, uploads)
    except Disconnected:
        raise
    except Exception as error:
        _drain(uploads)
        send(line, {"error": _describe(error)})
        return
    _drain(uploads)
    send(line, {"result": reply.result, "sets": len(reply.sets)})
    for tensors in reply.sets:
        send(line, {}, tensors)


def _uploads(line: socket.socket) -> Iterator[tuple[ClientRecord, Arrays]]:
    while True:
        message, tensors = receive(line)
        if message["is_last"]:
            return
        yield calls.read_client(message["client"]), tensors


def _drain(uploads: Iterator[object]) -> None:
    for _ in uploads:
        pass


def _describe(error: Exception) -> dict[str, Any]:
    if isinstance(error, DistransError):
        kind = type(error) if type(error).__module__ == errors.__name__ else DistransError
        return {"kind": kind.__name__, "message": error.message, "next_step": error.next_step}
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] in ("torch", "torchvision"):
        return {"kind": "missing", "message": error.name}
    return {"kind": "unexpected", "message": f"{type(error).__name__}: {error}"}
