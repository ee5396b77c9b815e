"""The dispatcher behind a ToolCompose and its clones: never pickled, closed when the last of them is gone."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import weakref

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.dispatch.loop import run, start

logger = logging.getLogger(__name__)


class Runtime:
    """A dispatcher with the number of the process that may use it.

    After a fork, its event loop is not there.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.pid = os.getpid()
        self.dispatcher = dispatcher
        weakref.finalize(self, _close_later, self.pid, self.dispatcher).atexit = False
        _open.add(self)

    @property
    def is_ours(self) -> bool:
        """Whether this process may use it."""
        return self.pid == os.getpid()


_open: weakref.WeakSet[Runtime] = weakref.WeakSet()


def _close_later(pid: int, dispatcher: Dispatcher) -> None:
    """Close it without waiting.

    The garbage collector may run on any thread, that of the event loop included.
    """
    if pid == os.getpid():
        start(dispatcher.close())


@atexit.register
def _close_all() -> None:
    for runtime in list(_open):
        if runtime.is_ours:
            with contextlib.suppress(Exception):
                run(runtime.dispatcher.close())
