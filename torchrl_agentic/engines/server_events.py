"""`event_data`: the data of server-sent events, in which servers stream answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

DONE = b"[DONE]"
"""Data of the last event of a stream that is whole."""


async def event_data(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """Yield the data of each event of a stream, up to `DONE` if there is one.

    Args:
        chunks: The body of the response.
    """
    rest = bytearray()
    async for chunk in chunks:
        rest += chunk
        if b"\n" not in chunk:
            continue
        *lines, rest = rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (data := bytes(line[5:]).strip()):
                yield data
                if data == DONE:
                    return
