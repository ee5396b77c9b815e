"""The pipes that code inside prints into, read all the time and kept in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Callable

from torchrl_agentic.sandbox.inside.capture import CHUNK, Capture
from torchrl_agentic.sandbox.inside.reactor import Reactor

ROUNDS_AT_THE_END = 64
"""How many reads are made behind the end: as much as the largest pipe that anybody may make holds."""


class Pipe:
    """One of them. end: for whoever writes. on_data: called after each read."""

    def __init__(self, reactor: Reactor, limit: int, on_data: Callable[[], None] | None = None) -> None:
        self._reactor, self._on_data = reactor, on_data
        self.fd, self.end = os.pipe()
        os.set_blocking(self.fd, False)
        self.capture = Capture(limit)
        self._open = True
        reactor.watch(self.fd, self._pull)

    def _pull(self, rounds: int = 16) -> None:
        for _ in range(rounds):
            try:
                data = os.read(self.fd, CHUNK)
            except BlockingIOError:
                break
            if not data:
                self.close()
                break
            self.capture.add(data)
        if self._on_data is not None:
            self._on_data()

    def pull(self) -> None:
        """Read what is there."""
        if self._open:
            call, self._on_data = self._on_data, None
            self._pull(ROUNDS_AT_THE_END)
            self._on_data = call

    def fileno(self) -> int:
        """Give the number of the end that we read."""
        return self.fd

    def close_end(self) -> None:
        """Leave the writing to whoever has the end by now."""
        os.close(self.end)

    def close(self) -> None:
        """Read no more."""
        if self._open:
            self._open = False
            self._reactor.forget(self.fd)
            os.close(self.fd)

    def take(self) -> tuple[bytes, int]:
        """Give what was kept up to now, and how many bytes were not; begin anew."""
        self.pull()
        return self.capture.take()
