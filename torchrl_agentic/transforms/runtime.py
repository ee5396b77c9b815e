"""The dispatcher behind a ToolCompose and its clones: never pickled, closed when the last of them is gone."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from torchrl_agentic.dispatch import Dispatcher, Session
from torchrl_agentic.dispatch.event_loop import run, start

logger = logging.getLogger(__name__)


class Runtime:
    """What a ToolCompose and its clones share, with the number of the process that may use it.

    After a fork, its event loop is not there. toolsets_open: whether their toolsets are set up.
    """

    def __init__(self, dispatcher: Dispatcher, *, toolsets_open: bool) -> None:
        self.pid = os.getpid()
        self.dispatcher = dispatcher
        self.toolsets_open = toolsets_open
        weakref.finalize(self, _later, self.pid, dispatcher.close_all).atexit = False
        _open.add(self)

    @property
    def is_ours(self) -> bool:
        """Whether this process may use it."""
        return self.pid == os.getpid()

    def close_sessions_with(self, user: object, dispatcher: Dispatcher) -> None:
        """Close the sessions of one of those who share it when that one is gone."""
        weakref.finalize(user, _later, self.pid, dispatcher.close_sessions).atexit = False


def close_sessions(sessions: Iterable[Session]) -> None:
    """Close these sessions at once, and wait for that."""
    busy = [session for session in sessions if session.is_busy]
    if busy:

        async def close() -> None:
            await asyncio.gather(*(session.close() for session in busy))

        run(close())


_open: weakref.WeakSet[Runtime] = weakref.WeakSet()


def _later(pid: int, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Close without waiting.

    The garbage collector may run on any thread, that of the event loop included.
    """
    if pid == os.getpid():
        start(close())


@atexit.register
def _close_all() -> None:
    for runtime in list(_open):
        if runtime.is_ours:
            with contextlib.suppress(Exception):
                run(runtime.dispatcher.close_all())
