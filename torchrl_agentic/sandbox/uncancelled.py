"""Work that must be done also if whoever waits for it is cancelled: ending what was begun, above all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")
_logger = logging.getLogger(__name__)


async def to_the_end(work: Awaitable[T], *, however_often: bool = False) -> T:
    """Do something to its end also when we are cancelled meanwhile; the cancellation waits for it.

    however_often: also if we are cancelled once more; otherwise it goes on without us then.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait((task,))
            except asyncio.CancelledError:
                if not however_often:
                    raise
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.warning("cleaning up failed: %s", error)
        raise
