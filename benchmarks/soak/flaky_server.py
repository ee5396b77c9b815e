"""An HTTP server that fails: `python flaky_server.py PORT` on loopback, until it is killed.

The path says what happens: /ok, /error (status 500), /cut (a connection that ends in mid-body), /refuse (one
that ends at once), /slow (a byte at a time), /hang, /big, /nonsense.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one connection."""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        while request := await reader.readuntil(b"\r\n\r\n"):
            path = request.split(b" ", 2)[1].partition(b"?")[0]
            if path == b"/refuse":
                break
            if path == b"/hang":
                await asyncio.sleep(3600)
            if path == b"/nonsense":
                writer.write(b"\x00\xff" * 500)
                break
            if path == b"/error":
                writer.write(b"HTTP/1.1 500 No\r\nContent-Length: 4\r\n\r\nfail")
            elif path == b"/cut":
                writer.write(OK % 1000 + b"x" * 500)
                break
            elif path == b"/slow":
                writer.write(OK % 600)
                for _ in range(600):
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.05)
            elif path == b"/big":
                writer.write(OK % (4 << 20) + bytes(4 << 20))
            else:
                writer.write(OK % len(request) + request)
            await writer.drain()
    with contextlib.suppress(ConnectionError):
        writer.close()
        await writer.wait_closed()


async def main(port: int) -> None:
    """Serve until killed."""
    server = await asyncio.start_server(answer, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
