"""`Reactor`: an event loop for files, timers and child processes."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import select
import signal
import time
from collections.abc import Callable

_MOST_S = 1e6
READ, WRITE = select.POLLIN, select.POLLOUT


def _nothing(number: int, frame: object) -> None:
    """Do nothing: the signal only has to wake the loop."""


class Timer:
    """A callback at a time, unless it is cancelled before."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        """Cancel the callback."""
        self.cancelled = True


class Reactor:
    """The main loop of a process with one thread and children."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._files: dict[int, Callable[[], None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._children: dict[int, Callable[[int], None]] = {}
        self._woken, alarm = os.pipe()
        self.own_files = (self._woken, alarm)
        for fd in self.own_files:
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _nothing)
        self.watch(self._woken, self.reap)

    def watch(self, fd: int, call: Callable[[], None], events: int = READ) -> None:
        """Call a function whenever a file is readable, or has other events; also at its end.

        Args:
            fd: Descriptor of the file.
            call: The function.
            events: Events as in `select.poll`.
        """
        self._files[fd] = call
        self._poll.register(fd, events)

    def forget(self, fd: int) -> None:
        """Stop watching a file; call it before closing the file."""
        if self._files.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def after(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Call a function once after some seconds.

        Args:
            seconds: The delay.
            call: The function.
        """
        timer = Timer(call)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), timer))
        return timer

    def on_exit(self, pid: int, call: Callable[[int], None]) -> None:
        """Call a function when a child has ended.

        Args:
            pid: The child.
            call: Gets its exit code, -n for signal n.
        """
        self._children[pid] = call

    def run(self) -> None:
        """Run until the process ends."""
        while True:
            self.step()

    def step(self) -> None:
        """Wait for the next event and run its callbacks."""
        for fd, _ in self._poll.poll(self._patience()):
            call = self._files.get(fd)
            if call is not None:
                call()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if not timer.cancelled:
                timer.call()

    def _patience(self) -> float | None:
        while self._timers and self._timers[0][2].cancelled:
            heapq.heappop(self._timers)
        if not self._timers:
            return None
        return min(max(0.0, self._timers[0][0] - time.monotonic()), _MOST_S) * 1000 + 1

    def reap(self) -> None:
        """Reap the children that have ended."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 512)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            call = self._children.pop(pid, None)
            if call is not None:
                call(os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status))
