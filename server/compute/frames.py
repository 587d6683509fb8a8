"""Messages between the coordinator and its torch process: JSON and, if it says so, one set of tensors as safetensors.

8 bytes: length of the JSON │ JSON │ safetensors
"""

import json
import socket
from collections.abc import Mapping
from typing import Any

from shared.tensors.arrays import Array, Arrays, empty, memory_of
from shared.tensors.wire import Encoded, Layout

_MAX_TEXT_BYTES = 1 << 30  # a plan or a roster may have many names; anything longer is an error of ours
_PIECE_BYTES = 1 << 20  # each piece may take as long as the socket's timeout
_TENSORS = "tensors"


class Disconnected(Exception):
    """The other process has ended, or was silent for too long."""


def send(line: socket.socket, message: Mapping[str, Any], tensors: Mapping[str, Array] | None = None) -> None:
    """Send one message. Raise Disconnected if nobody takes it."""
    text = json.dumps({**message, _TENSORS: tensors is not None}).encode()
    try:
        line.sendall(len(text).to_bytes(8, "little"))
        line.sendall(text)
        if tensors is not None:
            for piece in Encoded(tensors).pieces(_PIECE_BYTES):
                line.sendall(piece)
    except OSError as error:
        raise Disconnected(str(error)) from error


def receive(line: socket.socket) -> tuple[dict[str, Any], Arrays]:
    """Return the next message and its tensors, in memory that torch can use as it is. Raise Disconnected at the end."""
    length = int.from_bytes(_read(line, 8), "little")
    if length > _MAX_TEXT_BYTES:
        raise Disconnected(f"a message claims {length} bytes of text")
    message: dict[str, Any] = json.loads(_read(line, length))
    if not message.pop(_TENSORS):
        return message, {}
    head = _read(line, 8)
    layout = Layout.read(head + _read(line, Layout.header_bytes(head) - 8))
    arrays = {name: empty(entry.shape, entry.dtype) for name, entry in layout.spec.entries.items()}
    for array in arrays.values():
        _read_into(line, memory_of(array))
    return message, arrays


def _read(line: socket.socket, size_bytes: int) -> bytearray:
    data = bytearray(size_bytes)
    _read_into(line, memoryview(data))
    return data


def _read_into(line: socket.socket, target: memoryview) -> None:
    while target:
        try:
            count = line.recv_into(target)
        except OSError as error:
            raise Disconnected(str(error)) from error
        if not count:
            raise Disconnected("its end of the line is closed")
        target = target[count:]
