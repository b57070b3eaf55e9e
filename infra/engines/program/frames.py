"""The protocol of an engine's program: messages of a header in JSON, then raw buffers.

    4 bytes    the length of the header, unsigned, big-endian
    header     a JSON object; `sizes` lists the bytes of each buffer
    buffers    one after the other

A request names a `call` and has its `arguments`; its reply has a `result`, or an `error` and its `type`. There is one
reply per request, in order. Nothing is pickled. Needs the standard library only: both sides load this file.
A bucket of weights is no message but a file that the program maps, and verifies by its checksum.
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
_COLUMNS, _ROWS = 1024, 64  # words of a block: its 512 KiB stay in a core's cache between its four sums
_MODULUS = 2**64


class ProtocolError(Exception):
    """What was received is no message."""


class ChecksumError(Exception):
    """A bucket of weights is not what was sent."""


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
        raise ProtocolError(f"a header that is not a JSON object with sizes: {bytes(text[:80])!r}") from None
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


def checksum(words: Any, rows: int = _ROWS) -> str:
    """Return the checksum of a bucket of weights: four sums over its words, modulo 2^64, as 64 hexadecimal digits.

    They are those of the words and of the products with their positions, then both of the upper halves of the words.

    Args:
        words: int64 [n], a numpy array or a torch tensor on any device; its sums wrap around.
        rows: How many times 1,024 words are summed at a time.
    """
    sums = [0, 0, 0, 0]
    for first in range(0, len(words), rows * _COLUMNS):
        block = words[first : first + rows * _COLUMNS]
        whole = len(block) // _COLUMNS * _COLUMNS
        parts = (first, block[:whole].reshape(-1, _COLUMNS)), (first + whole, block[whole:].reshape(1, -1))
        for start, part in parts:
            for at, values in ((0, part), (2, part >> 32)):
                plain, weighted = _sums(values)
                sums[at] = (sums[at] + plain) % _MODULUS
                sums[at + 1] = (sums[at + 1] + weighted + start * plain) % _MODULUS
    return "".join(f"{total:016x}" for total in sums)


def compare(found: str, expected: str) -> None:
    """Compare the checksum of a mapped bucket with the one that was sent with it.

    Raises:
        ChecksumError: They differ; none of its tensors may be used.
    """
    if found != expected:
        raise ChecksumError(f"checksum {found}, expected {expected}")


def _sums(values: Any) -> tuple[int, int]:
    """Return the sums of a matrix's words, int64 [R, C], and of their products with their positions, modulo 2^64."""
    by_row, by_column = values.sum(1), values.sum(0)
    rows, columns = _positions(by_row), _positions(by_column)
    return int(by_row.sum()), values.shape[1] * int((by_row * rows).sum()) + int((by_column * columns).sum())


def _positions(values: Any) -> Any:
    return (0 * values + 1).cumsum(0) - 1


def _receive(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = connection.recv_into(view[done:])
        if not count:
            raise EOFError("the connection was closed")
        done += count
    return data
