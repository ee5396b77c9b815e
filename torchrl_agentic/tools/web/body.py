"""A response body, read with bounds: so many bytes from the wire, so many after decompression."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from torchrl_agentic.errors import ToolError
from torchrl_agentic.schema import shorten
from torchrl_agentic.tools.web.backend import WireLimit

ACCEPTED = "gzip, deflate"
"""What we ask for: zlib can stop after so many bytes."""

MAX_MEMBERS = 100
"""How many gzip files in a row are read: each costs a copy of what follows."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a body ended. truncated: at our bound. problem: why it is not whole otherwise, None where it is."""

    truncated: bool = False
    problem: str | None = None


class Inflater:
    """Decompresses gzip (of several members too) and deflate (with zlib's header or without), step by step.

    finished: what follows is padding. whole: it could end here.
    """

    def __init__(self, encoding: str) -> None:
        self._is_gzip = encoding == "gzip"
        self._stream = zlib.decompressobj(31) if self._is_gzip else None
        self._members = 0
        self.finished = False
        self.whole = True

    def feed(self, data: bytes, most: int) -> bytes:
        """Give what comes of some compressed bytes, `most` bytes at most; what is over is lost.

        Raises:
            zlib.error: they are not compressed as announced.
        """
        out = b""
        while data and len(out) < most and not self.finished:
            if self._stream is None:
                # Deflate is meant to have zlib's header; some servers leave it out.
                self._stream = zlib.decompressobj(15 if data[0] & 0x0F == 8 else -15)
            self.whole = False
            out += self._stream.decompress(data, most - len(out))
            data = b""
            if self._stream.eof:
                self.whole = True
                self._members += 1
                if self._members > MAX_MEMBERS:
                    raise zlib.error("too many members")
                data = self._stream.unused_data
                # Zeros, or anything else behind the last member, are padding.
                self.finished = not (self._is_gzip and data[:1] in (b"", b"\x1f"))
                self._stream = zlib.decompressobj(31) if self._is_gzip else None
        return out


def inflater_for(content_encoding: str) -> Inflater | None:
    """Give what decompresses a body; None where it is not compressed.

    Raises:
        ToolError: it is compressed in a way we did not ask for, or more than once.
    """
    names = [name.strip().lower() for name in content_encoding.split(",")]
    match [name for name in names if name not in ("", "identity")]:
        case []:
            return None
        case ["gzip" | "x-gzip"]:
            return Inflater("gzip")
        case ["deflate"]:
            return Inflater("deflate")
        case _:
            raise ToolError(
                f"the answer is compressed as {shorten(content_encoding, 40)!a}; gzip and deflate can be read"
            )


async def read_body(
    chunks: AsyncIterator[bytes], inflater: Inflater | None, most: int, into: bytearray
) -> Ended:
    """Read a body up to `most` bytes; what has arrived is in `into` whatever happens."""
    try:
        async for chunk in chunks:
            # One more than there is room for tells a body that fits from one that does not.
            room = most + 1 - len(into)
            into += chunk if inflater is None else inflater.feed(chunk, room)
            if len(into) > most:
                del into[most:]
                return Ended(truncated=True)
    except WireLimit:
        return Ended(truncated=True)
    except zlib.error:
        return Ended(problem="the rest is not compressed as announced")
    return Ended(problem=None if inflater is None or inflater.whole else "the compressed data ends too early")
