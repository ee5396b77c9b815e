"""Blocking work and cleanup around cancellation: run a function in a thread, run cleanup to completion."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def run_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking function in a new thread and wait for its result.

    A new thread is used because the event loop's own executor is closed at exit. If no thread can be started
    any more, the function runs in the calling thread.

    Args:
        function: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)  # pyright: ignore[reportArgumentType]  a T if there is no error

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


async def run_to_completion(work: Awaitable[T], *, always_wait: bool = False) -> T:
    """Run cleanup to completion even if the caller is cancelled; raise the cancellation afterwards.

    Args:
        work: The cleanup.
        always_wait: Keep waiting if the caller is cancelled a second time; otherwise the cleanup then
            continues in the background.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait((task,))
            except asyncio.CancelledError:
                if not always_wait:
                    raise
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.warning("cleanup after a cancellation failed: %s", error)
        raise
