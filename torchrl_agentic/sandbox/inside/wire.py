"""Messages between the processes of an interpreter: a length, then fields of bytes, each with its length.

All lengths are four bytes, big-endian. Nothing in a message can be taken for its end, and reading one costs
no more memory than it has bytes: those from inside a sandbox may be forged.
"""

from __future__ import annotations

import struct
from typing import Any

_LENGTH = struct.Struct(">I")


class BadMessage(Exception):
    """What came in is no message, or is too long."""


def pack(*fields: Any) -> bytes:
    """Make a message of byte strings."""
    parts = [b""]
    size = 0
    for field in fields:
        parts.append(_LENGTH.pack(len(field)))
        parts.append(field)
        size += 4 + len(field)
    parts[0] = _LENGTH.pack(size)
    return b"".join(parts)


class Splitter:
    """Takes bytes as they come and gives the messages in them. limit: the longest message, in bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[list[bytes]]:
        """Take some bytes, and give the messages that they complete.

        Raises:
            BadMessage: a message is too long, or its fields do not fill it.
        """
        self._buffer += data
        messages: list[list[bytes]] = []
        start = 0
        while len(self._buffer) - start >= 4:
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            if size > self._limit:
                raise BadMessage(f"a message of {size} bytes")
            if len(self._buffer) - start < 4 + size:
                break
            messages.append(_fields(self._buffer, start + 4, start + 4 + size))
            start += 4 + size
        del self._buffer[:start]
        return messages


def _fields(buffer: bytearray, start: int, end: int) -> list[bytes]:
    fields: list[bytes] = []
    while start < end:
        if start + 4 > end:
            raise BadMessage("half a length")
        (size,) = _LENGTH.unpack_from(buffer, start)
        start += 4
        if start + size > end:
            raise BadMessage("a field that leaves its message")
        fields.append(bytes(buffer[start : start + size]))
        start += size
    return fields
