"""The monitor sees work that holds up the event loop, and only that."""

import asyncio
import time

import pytest
from helpers.limit import limit
from helpers.loop_stalls import no_stalls


async def work(seconds: float) -> None:
    """Compute for some seconds of processor time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


async def test_a_stall_fails_and_waiting_does_not():
    with pytest.raises(AssertionError, match="the event loop stood still"):
        async with no_stalls(0.01):
            await work(2 * limit(0.01))
    async with no_stalls(0.01):
        await asyncio.sleep(2 * limit(0.01))
