"""Frames between us and an interpreter: four bytes of length, big-endian, then JSON in ASCII.

Nothing in a frame can be taken for its end, and nothing in it is code: frames from inside a sandbox may be
forged. The other side of it is in `worker.py`, which must work without this package.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any, cast

MAX_FRAME = 4 << 20
"""The longest frame that we accept, in bytes."""
MAX_CODE = 16 << 20
"""The longest code that we send, in characters."""


class BadFrame(Exception):
    """What came in is no frame, or is too long."""


def pack(message: dict[str, Any]) -> bytes:
    """Make a frame."""
    body = json.dumps(message).encode("ascii")
    return struct.pack(">I", len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Wait for a frame.

    Raises:
        EOFError: the other side is gone.
        BadFrame: it is too long, no JSON, or no object.
    """
    try:
        (length,) = struct.unpack(">I", await reader.readexactly(4))
        if length > MAX_FRAME:
            raise BadFrame(f"a frame of {length} bytes")
        body = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        raise EOFError from None
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        raise BadFrame("no JSON") from None
    if not isinstance(message, dict):
        raise BadFrame("no object")
    return cast("dict[str, Any]", message)
