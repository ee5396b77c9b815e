"""Blocking file work off the event loop, on a thread of its own.

The loop's default threads are gone at exit.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def off_loop(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function on a thread and wait for it; where no thread can be had any more, run it in place."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)  # pyright: ignore[reportArgumentType]  without an error it is a T

    def work() -> None:
        try:
            value, error = function(*args, **kwargs), None
        except BaseException as raised:
            value, error = None, raised
        loop.call_soon_threadsafe(settle, value, error)

    try:
        threading.Thread(target=work, name="torchrl_agentic-files", daemon=True).start()
    except RuntimeError:
        return function(*args, **kwargs)
    return await future


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
