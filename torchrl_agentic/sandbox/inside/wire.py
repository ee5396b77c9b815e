"""Messages between the processes of an interpreter: a length, then binary fields, each with its length.

Lengths are four bytes, big-endian. No content can be taken for the end of a message, and reading a message
costs no more memory and time than its bytes, because messages from inside a sandbox may be forged: the number
of fields is bounded, too.
"""

from __future__ import annotations

import struct
from typing import Any

MAX_FIELDS = 64
"""Maximum number of fields of a message; the largest have the displayed objects of a cell."""
_LENGTH = struct.Struct(">I")


class BadMessage(Exception):
    """A message is malformed, too long, or has too many fields."""


def pack(*fields: Any) -> bytes:
    """Return a message with these fields.

    Args:
        fields: Byte strings.
    """
    parts = [b""]
    size = 0
    for field in fields:
        parts.append(_LENGTH.pack(len(field)))
        parts.append(field)
        size += 4 + len(field)
    parts[0] = _LENGTH.pack(size)
    return b"".join(parts)


class Splitter:
    """Splits a stream of bytes into messages.

    Args:
        limit: Maximum bytes of a message.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[list[bytes]]:
        """Add bytes and return the messages that they complete.

        Args:
            data: The bytes.

        Raises:
            BadMessage: If a message is too long, has no field or too many, or its fields do not fill it.
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
        if len(fields) == MAX_FIELDS:
            raise BadMessage(f"more than {MAX_FIELDS} fields")
        if start + 4 > end:
            raise BadMessage("a truncated length")
        (size,) = _LENGTH.unpack_from(buffer, start)
        start += 4
        if start + size > end:
            raise BadMessage("a field that exceeds its message")
        fields.append(bytes(buffer[start : start + size]))
        start += size
    if not fields:
        raise BadMessage("a message without fields")
    return fields
