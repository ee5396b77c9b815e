"""Close a server of a test, with the connections that are still on their way to its handler."""

import asyncio

ROUNDS = 5
"""Rounds of the event loop from an accepted connection to the first step of its handler, and one more."""


async def stop_listening(server: asyncio.Server) -> None:
    """Accept no connection any more; return once the handlers of those that were accepted have begun.

    A connection whose handler has not begun is unknown to the test, and asyncio forgets to close one that it
    has accepted when the server closes.
    """
    loop = asyncio.get_running_loop()
    for listening in server.sockets:
        loop.remove_reader(listening.fileno())
    for _ in range(ROUNDS):
        await asyncio.sleep(0)
    server.close()
