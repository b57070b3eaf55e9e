"""The protocol of an engine's program: messages of a header in JSON, then raw buffers.

    4 bytes    the length of the header, unsigned, big-endian
    header     a JSON object; `sizes` lists the bytes of each buffer
    buffers    one after the other

A request names a `call` and has its `arguments`; its reply has a `result`, or an `error` and its `type`. There is one
reply per request, in order. Nothing is pickled. Needs the standard library only: both sides load this file.
"""

import json
import socket
import struct
import traceback
from collections.abc import Sequence
from typing import Any

PROTOCOL = 1  # rises with every change that an older program would not understand
MAX_HEADER_BYTES = 2**28
MAX_BUFFER_BYTES = 2**36
_LENGTH = struct.Struct("!I")


class ProtocolError(Exception):
    """What was received is no message."""


def send(connection: socket.socket, header: dict[str, Any], buffers: Sequence[Any] = ()) -> None:
    """Send a message; each buffer is an object with the buffer protocol, whose bytes are contiguous."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    text = json.dumps(header | {"sizes": [len(view) for view in views]}).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)
    for view in views:
        if len(view):
            connection.sendall(view)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[bytearray]]:
    """Wait for a message, and return its header and its buffers.

    Raises:
        EOFError: The other side has closed the connection.
        ProtocolError: It sent something else.
    """
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    if length > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {length} bytes, expected at most {MAX_HEADER_BYTES}")
    text = _receive(connection, length)
    try:
        header = json.loads(text)
        sizes = header["sizes"]
        if not all(type(size) is int and 0 <= size <= MAX_BUFFER_BYTES for size in sizes):
            raise TypeError
    except (ValueError, TypeError, KeyError):
        raise ProtocolError(f"a header that is no JSON object with sizes: {bytes(text[:80])!r}") from None
    return header, [_receive(connection, size) for size in sizes]


def serve(connection: socket.socket, engine: object) -> None:
    """Answer requests until the other side closes the connection.

    Args:
        connection: The connection.
        engine: Its public methods are the calls: each takes the arguments and the buffers, and returns a result and
            buffers.
    """
    while True:
        try:
            header, buffers = receive(connection)
        except EOFError:
            return
        try:
            name = str(header["call"])
            if name.startswith("_") or (call := getattr(engine, name, None)) is None:
                raise ProtocolError(f"there is no call {name!r}")
            result, found = call(header.get("arguments", {}), buffers)
        except Exception as error:  # noqa: BLE001 - told to the other side, which decides
            traceback.print_exc()
            send(connection, {"error": str(error), "type": type(error).__name__})
        else:
            send(connection, {"result": result}, found)


def _receive(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = connection.recv_into(view[done:])
        if not count:
            raise EOFError("the connection was closed")
        done += count
    return data
