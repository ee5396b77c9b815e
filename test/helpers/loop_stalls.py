"""Measure how long a coroutine holds up the event loop, in processor time of this process."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from helpers.limit import limit

STALL_S = 0.1
"""Longest stall of an event loop that many trajectories share."""
BEAT_S = 0.002


@contextlib.asynccontextmanager
async def no_stalls(seconds: float = STALL_S) -> AsyncIterator[None]:
    """Fail if the event loop stands still while the block runs.

    Other processes do not count, because processor time is measured. Threads of this one count.

    Args:
        seconds: Longest stall on an idle machine.
    """
    longest = 0.0

    async def beat() -> None:
        nonlocal longest
        while True:
            before = time.process_time()
            await asyncio.sleep(BEAT_S)
            longest = max(longest, time.process_time() - before)

    beating = asyncio.create_task(beat())
    await asyncio.sleep(0)
    try:
        yield
        await asyncio.sleep(2 * BEAT_S)  # so that the beat after the block counts too
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
    assert longest < limit(seconds), f"the event loop stood still for {longest:.3f} s"
